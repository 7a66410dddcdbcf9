// check.h - user errors, and the way from tensors to views. Every message reads
// "sparse_ce: <argument> must be <expectation>, got <value>".
#pragma once

#include "cross_entropy.h"

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

// The headers of torch 2.11 and 2.12 can say that a call of torch's failed, but not yet why.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace sparse_ce {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename... parts_t>
[[noreturn]] void fail(const parts_t&... parts) {
  std::ostringstream out;
  out << "sparse_ce: ";
  ((out << parts), ...);
  throw std::runtime_error(out.str());
}

template <typename... parts_t>
void check(bool condition, const parts_t&... parts) {
  if (!condition) fail(parts...);
}

inline std::string shape(const Tensor& t) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << "]";
  return out.str();
}

// Of the dtypes that the ops make.
inline int64_t size_in_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Float:
      return 4;
    default:
      return 8;
  }
}

inline std::string name(ScalarType dtype) { return torch::headeronly::toString(dtype); }

inline DType to_dtype(const Tensor& t, const char* argument, bool integer) {
  switch (t.scalar_type()) {
    case ScalarType::Int:
      if (integer) return DType::kInt32;
      break;
    case ScalarType::Long:
      if (integer) return DType::kInt64;
      break;
    case ScalarType::Float:
      if (!integer) return DType::kFloat32;
      break;
    case ScalarType::Double:
      if (!integer) return DType::kFloat64;
      break;
    case ScalarType::Half:
      if (!integer) return DType::kFloat16;
      break;
    case ScalarType::BFloat16:
      if (!integer) return DType::kBFloat16;
      break;
    default:
      break;
  }
  fail(argument, " must be of dtype ", integer ? "int32 or int64" : "float16, bfloat16, float32 or float64", ", got ",
       name(t.scalar_type()));
}

// The arguments that every op takes, in the order of the schema.
struct Options {
  int64_t ignore_index;
  double label_smoothing, z_loss, logit_scale;
  std::optional<double> softcap;
  std::optional<int64_t> num_classes;
};

struct Target {
  Tensor indices;
  OptionalTensor values, offsets, weight, row_mask;
  bool logprobs;
};

// Keeps what the views point to: contiguous copies where a tensor was strided, the sum of the class weights.
struct Held {
  Tensor logits, indices;
  OptionalTensor values, offsets, row_mask, weight, weight_sum;
};

// A call of the dispatcher only where there is something to copy.
inline Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline void check_same_device(const Tensor& t, const Tensor& logits, const char* argument) {
  const auto name = [](const Tensor& x) {
    return x.is_cpu() ? std::string("cpu") : "cuda:" + std::to_string(x.get_device_index());
  };
  const bool same = t.is_cpu() == logits.is_cpu() && t.get_device_index() == logits.get_device_index();
  if (!same) fail(argument, " must be on the device of logits, ", name(logits), ", got ", name(t));
}

// `classes`: what there are `vocab` of.
inline void check_options(const Options& options, int64_t vocab, const char* classes) {
  check(options.label_smoothing >= 0 && options.label_smoothing <= 1, "label_smoothing must be in [0, 1], got ",
        options.label_smoothing);
  check(std::isfinite(options.z_loss) && options.z_loss >= 0, "z_loss must be finite and not negative, got ",
        options.z_loss);
  check(std::isfinite(options.logit_scale), "logit_scale must be finite, got ", options.logit_scale);
  check(!options.softcap || (std::isfinite(*options.softcap) && *options.softcap > 0),
        "softcap must be a positive number or None, got ", options.softcap.value_or(0));
  check(!options.num_classes || (*options.num_classes > 0 && *options.num_classes <= vocab),
        "num_classes must be in [1, ", vocab, "], ", classes, ", got ", options.num_classes.value_or(0));
}

// Logits (rows, vocab) may have any row stride; only a column stride other than 1 costs a copy.
inline void view_logits(const Tensor& logits, Held& held, CrossEntropyArgs& args) {
  check(logits.dim() == 2, "logits must be (rows, vocab), got ", shape(logits));
  args.dtype = to_dtype(logits, "logits", /*integer=*/false);
  args.rows = logits.size(0);
  args.vocab = logits.size(1);
  check(args.vocab > 0, "logits must have at least one class, got ", shape(logits));
  held.logits = logits.stride(1) == 1 || args.vocab == 1 ? logits : packed(logits);
  args.logits = held.logits.const_data_ptr();
  args.row_stride = held.logits.stride(0);
}

inline void view_target(const Target& parts, const Options& options, Held& held, CrossEntropyArgs& args) {
  const Tensor &logits = held.logits, &indices = parts.indices;
  const OptionalTensor &values = parts.values, &offsets = parts.offsets, &row_mask = parts.row_mask;
  TargetView& target = args.target;
  target = TargetView{};
  check_same_device(indices, logits, "indices");
  target.indices_dtype = to_dtype(indices, "indices", /*integer=*/true);
  if (offsets) {
    check_same_device(*offsets, logits, "offsets");
    check(indices.dim() == 1, "indices must be (entries,) where there are offsets, got ", shape(indices));
    const bool ends = offsets->dim() == 1 && offsets->size(0) == args.rows + 1;
    const bool ranges = offsets->dim() == 2 && offsets->size(0) == args.rows && offsets->size(1) == 2;
    check(ends || ranges, "offsets must be (", args.rows + 1, ",) or (", args.rows, ", 2) for ", args.rows,
          " rows of logits, got ", shape(*offsets));
    target.offsets_dtype = to_dtype(*offsets, "offsets", /*integer=*/true);
    target.offsets_step = ends ? 1 : 2;
    held.offsets = packed(*offsets);
    target.offsets = held.offsets->const_data_ptr();
  } else {
    check((indices.dim() == 1 || indices.dim() == 2) && indices.size(0) == args.rows, "indices must be (", args.rows,
          ",) or (", args.rows, ", K) for ", args.rows, " rows of logits, got ", shape(indices));
    target.width = indices.dim() == 1 ? 1 : indices.size(1);
  }
  held.indices = packed(indices);
  target.indices = held.indices.const_data_ptr();
  target.entries = indices.numel();
  target.rows = args.rows;
  target.labels = indices.dim() == 1 && !offsets && !values;
  if (values) {
    check_same_device(*values, logits, "values");
    check(values->dim() == indices.dim() && values->numel() == indices.numel() &&
              (values->dim() == 0 || values->size(0) == indices.size(0)),
          "values must have the shape of indices ", shape(indices), ", got ", shape(*values));
    target.values_dtype = to_dtype(*values, "values", /*integer=*/false);
    held.values = packed(*values);
    target.values = held.values->const_data_ptr();
    target.logprobs = parts.logprobs;
  }
  if (row_mask) {
    check_same_device(*row_mask, logits, "row_mask");
    check(row_mask->scalar_type() == ScalarType::Bool, "row_mask must be of dtype bool, got ",
          name(row_mask->scalar_type()));
    check(row_mask->dim() == 1 && row_mask->size(0) == args.rows, "row_mask must be (", args.rows, ",), got ",
          shape(*row_mask));
    held.row_mask = packed(*row_mask);
    target.row_mask = static_cast<const bool*>(held.row_mask->const_data_ptr());
  }
  target.num_classes = options.num_classes.value_or(args.vocab);
  target.ignore_index = options.ignore_index;
}

inline ScalarType arithmetic_dtype(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void view_weight(const OptionalTensor& weight, const Options& options, Held& held, CrossEntropyArgs& args) {
  args.weight_sum = nullptr;
  if (!weight) return;
  check_same_device(*weight, held.logits, "weight");
  const ScalarType dtype = arithmetic_dtype(held.logits);
  check(weight->scalar_type() == dtype, "weight must be of dtype ", name(dtype), " (the arithmetic of ",
        name(held.logits.scalar_type()), " logits), got ", name(weight->scalar_type()));
  check(weight->dim() == 1 && weight->size(0) == args.target.num_classes, "weight must be (", args.target.num_classes,
        ",), one weight a class, got ", shape(*weight));
  held.weight = packed(*weight);
  args.target.weight = held.weight->const_data_ptr();
  if (options.label_smoothing != 0) {
    held.weight_sum = torch::stable::sum(*held.weight);
    args.weight_sum = held.weight_sum->const_data_ptr();
  }
}

inline void view_options(const Options& options, CrossEntropyArgs& args) {
  args.options.label_smoothing = options.label_smoothing;
  args.options.z_loss = options.z_loss;
  args.options.logit_scale = options.logit_scale;
  args.options.softcap = options.softcap.value_or(0);
}

inline void make_args(const Tensor& logits, const Target& target, const Options& options, Held& held,
                      CrossEntropyArgs& args) {
  view_logits(logits, held, args);
  check_options(options, args.vocab, "the columns of logits");
  view_target(target, options, held, args);
  view_weight(target.weight, options, held, args);
  view_options(options, args);
}

// A scalar of the arithmetic dtype of `like`, beside it.
inline const void* view_scalar(const Tensor& t, const Tensor& like, const char* argument) {
  check_same_device(t, like, argument);
  check(t.dim() == 0, argument, " must be (), got ", shape(t));
  check(t.scalar_type() == arithmetic_dtype(like), argument, " must be of dtype ", name(arithmetic_dtype(like)), ", got ",
        name(t.scalar_type()));
  return t.const_data_ptr();
}

// The losses of the rows take the place of the logits that they come from.
inline MeanArgs mean_args(const Tensor& loss, const Target& target, int64_t ignore_index, int64_t num_classes,
                          const OptionalTensor& normalizer, Held& held) {
  check(loss.dim() == 1, "loss must be (rows,), got ", shape(loss));
  const DType dtype = to_dtype(loss, "loss", /*integer=*/false);
  check(dtype == DType::kFloat32 || dtype == DType::kFloat64, "loss must be of dtype float32 or float64, got ",
        name(loss.scalar_type()));
  CrossEntropyArgs rows{};
  rows.rows = loss.size(0);
  rows.vocab = num_classes;
  held.logits = loss;
  const Options options{ignore_index, 0, 0, 1, std::nullopt, num_classes};
  view_target(target, options, held, rows);
  view_weight(target.weight, options, held, rows);
  MeanArgs args{};
  args.loss = loss.const_data_ptr();
  args.loss_stride = loss.stride(0);
  args.dtype = dtype;
  args.target = rows.target;
  args.normalizer = normalizer ? view_scalar(*normalizer, loss, "normalizer") : nullptr;
  return args;
}

// A vector (rows,) of the arithmetic dtype with any stride, 0 included.
inline const void* view_rows(const Tensor& t, const Tensor& logits, const char* argument, int64_t& stride) {
  check_same_device(t, logits, argument);
  check(t.dim() == 1 && t.size(0) == logits.size(0), argument, " must be (", logits.size(0), ",), got ", shape(t));
  const ScalarType dtype = arithmetic_dtype(logits);
  check(t.scalar_type() == dtype, argument, " must be of dtype ", name(dtype), ", got ", name(t.scalar_type()));
  stride = t.stride(0);
  return t.const_data_ptr();
}

// What every backward is given for its rows. `like`: of the device and dtype of the logits, with their rows.
inline BackwardArgs view_upstream(const CrossEntropyArgs& rows, const Tensor& like, const Tensor& grad_loss,
                                  const OptionalTensor& grad_lse, const Tensor& lse, const OptionalTensor& lse_residual) {
  BackwardArgs args{};
  static_cast<CrossEntropyArgs&>(args) = rows;
  int64_t stride = 1;
  args.grad_loss = view_rows(grad_loss, like, "grad_loss", args.grad_loss_stride);
  if (grad_lse) args.grad_lse = view_rows(*grad_lse, like, "grad_lse", args.grad_lse_stride);
  args.lse = view_rows(lse, like, "lse", stride);
  check(args.rows <= 1 || stride == 1, "lse must be contiguous, got stride ", stride);
  if (lse_residual) {
    args.lse_residual = view_rows(*lse_residual, like, "lse_residual", stride);
    check(args.rows <= 1 || stride == 1, "lse_residual must be contiguous, got stride ", stride);
  }
  return args;
}

// Whether any index is not a class. One cheap pass: most targets hold neither padding nor mistakes.
inline bool any_outside(const TargetView& target) {
  return with_index(target.indices_dtype, [&](auto index) {
    const auto* indices = static_cast<const decltype(index)*>(target.indices);
    bool outside = false;
    for (int64_t i = 0; i < target.entries; ++i)
      outside |= static_cast<uint64_t>(indices[i]) >= static_cast<uint64_t>(target.num_classes);
    return outside;
  });
}

// Names the first entry whose index is outside the classes; `target` points to host memory.
inline void check_entries(const TargetView& target) {
  const bool outside = any_outside(target);
  if (!target.offsets && !outside) return;
  for (int64_t r = 0; r < target.rows; ++r) {
    if (target.ignored(r)) continue;
    const EntryRange range = target.row(r);
    check(range.valid, "target must have offsets that lead to entries in [0, ", target.entries,
          "], got a range outside of it in row ", r);
    if (!outside) continue;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const auto entry = target.entry<double>(i);
      if (entry.column < 0 && entry.value != 0) {
        const int64_t index = load_int(target.indices, target.indices_dtype, i);
        if (index >= 0 && index < target.num_classes) continue;  // the weight itself is NaN: the loss will say so
        fail("target must have indices in [0, ", target.num_classes, ") or ignore_index ", target.ignore_index,
             ", got ", index, " in row ", r);
      }
    }
  }
}

}  // namespace sparse_ce
