// views.h - Checks tensors and converts them to the views that the devices take.
#pragma once

#include "../ops/cross_entropy.h"
#include "../ops/loss_mean.h"
#include "arguments.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace sparse_ce {

// Owns the memory that the views point to: contiguous copies of strided tensors, and the sum of the class weights.
struct Owned {
  Tensor logits, indices;
  OptionalTensor values, offsets, row_mask, weight, weight_sum, row_scale;
};

// Views logits (rows, vocab) with any row stride. Only a column stride other than 1 requires a copy.
inline void view_logits(const Tensor& logits, Owned& owned, CrossEntropyArgs& args) {
  check(logits.dim() == 2, "logits must be (rows, vocab), got ", shape(logits));
  args.dtype = to_dtype(logits, "logits", /*integer=*/false);
  args.rows = logits.size(0);
  args.vocab = logits.size(1);
  owned.logits = logits.stride(1) == 1 || args.vocab == 1 ? logits : packed(logits);
  args.logits = origin(owned.logits);
  args.row_stride = owned.logits.stride(0);
}

// Views logits (outer, inner, vocab). Only an inner stride other than 1 requires a copy.
inline void view_strided_logits(const Tensor& logits, Owned& owned, CrossEntropyArgs& args) {
  const int64_t inner = logits.size(1);
  args.dtype = to_dtype(logits, "logits", /*integer=*/false);
  args.rows = rows_of(logits);
  args.vocab = logits.size(2);
  check(args.vocab > 0, "logits must have at least one class, got ", shape(logits));
  owned.logits = logits.stride(1) == 1 || inner <= 1
                     ? logits
                     : torch::stable::transpose(packed(torch::stable::transpose(logits, 1, 2)), 1, 2);
  args.logits = origin(owned.logits);
  args.strided = {inner, owned.logits.stride(0), owned.logits.stride(2)};
}

// Views the entries of any arguments that have indices, values and offsets.
template <typename inputs_t>
void view_entries(const inputs_t& inputs, Owned& owned, TargetView& target) {
  const Tensor& indices = inputs.indices;
  const OptionalTensor &values = inputs.values, &offsets = inputs.offsets;
  const int64_t rows = target.rows;
  check_same_device(indices, owned.logits, "indices");
  target.indices_dtype = to_dtype(indices, "indices", /*integer=*/true);
  if (offsets) {
    check_same_device(*offsets, owned.logits, "offsets");
    check(indices.dim() == 1, "indices must be (entries,) if offsets are given, got ", shape(indices));
    const bool ends = offsets->dim() == 1 && offsets->size(0) == rows + 1;
    const bool ranges = offsets->dim() == 2 && offsets->size(0) == rows && offsets->size(1) == 2;
    check(ends || ranges, "offsets must be (", rows + 1, ",) or (", rows, ", 2) for ", rows, " rows of logits, got ",
          shape(*offsets));
    target.offsets_dtype = to_dtype(*offsets, "offsets", /*integer=*/true);
    target.offsets_step = ends ? 1 : 2;
    owned.offsets = packed(*offsets);
    target.offsets = origin(*owned.offsets);
  } else {
    check((indices.dim() == 1 || indices.dim() == 2) && indices.size(0) == rows, "indices must be (", rows, ",) or (",
          rows, ", K) for ", rows, " rows of logits, got ", shape(indices));
    target.width = indices.dim() == 1 ? 1 : indices.size(1);
  }
  owned.indices = packed(indices);
  target.indices = origin(owned.indices);
  target.entries = indices.numel();
  target.labels = indices.dim() == 1 && !offsets && !values;
  if (!values) return;
  check_same_device(*values, owned.logits, "values");
  check(values->dim() == indices.dim() && values->numel() == indices.numel() &&
            (values->dim() == 0 || values->size(0) == indices.size(0)),
        "values must have the shape of indices ", shape(indices), ", got ", shape(*values));
  target.values_dtype = to_dtype(*values, "values", /*integer=*/false);
  owned.values = packed(*values);
  target.values = origin(*owned.values);
}

inline void view_weight(const Tensor& weight, Owned& owned, TargetView& target) {
  check_same_device(weight, owned.logits, "weight");
  const ScalarType dtype = arithmetic_dtype(owned.logits);
  check(weight.scalar_type() == dtype, "weight must be of dtype ", name(dtype), " (the arithmetic dtype of ",
        name(owned.logits.scalar_type()), " logits), got ", name(weight.scalar_type()));
  check(weight.dim() == 1 && weight.size(0) == target.num_classes, "weight must be (", target.num_classes,
        ",), one weight per class, got ", shape(weight));
  owned.weight = packed(weight);
  target.weight = origin(*owned.weight);
}

// Views a target without class weights. Its rows are those of `owned.logits`.
template <typename inputs_t>
TargetView view_rows_and_entries(const inputs_t& inputs, int64_t num_classes, Owned& owned) {
  TargetView target{};
  target.rows = rows_of(owned.logits);
  target.num_classes = num_classes;
  target.ignore_index = inputs.ignore_index;
  view_entries(inputs, owned, target);
  if (inputs.row_mask) {
    const Tensor& row_mask = *inputs.row_mask;
    check_same_device(row_mask, owned.logits, "row_mask");
    check(row_mask.scalar_type() == ScalarType::Bool, "row_mask must be of dtype bool, got ",
          name(row_mask.scalar_type()));
    check(row_mask.dim() == 1 && row_mask.size(0) == target.rows, "row_mask must be (", target.rows, ",), got ",
          shape(row_mask));
    owned.row_mask = packed(row_mask);
    target.row_mask = static_cast<const bool*>(origin(*owned.row_mask));
  }
  return target;
}

inline TargetView view_target(const TargetArguments& inputs, int64_t num_classes, Owned& owned) {
  TargetView target = view_rows_and_entries(inputs, num_classes, owned);
  if (inputs.weight) view_weight(*inputs.weight, owned, target);
  return target;
}

// Views all arguments except the logits, which have `args.vocab` columns.
inline void view_arguments(const Arguments& inputs, Owned& owned, CrossEntropyArgs& args) {
  args.target = view_target(inputs, inputs.num_classes.value_or(args.vocab), owned);
  args.target.logprobs = inputs.values && inputs.logprobs;
  args.options = inputs.options();
  if (inputs.row_scale) {
    owned.row_scale = inputs.row_scale;
    args.row_scale = view_scale(*inputs.row_scale, owned.logits, "row_scale", args.row_scale_stride);
  }
  if (!inputs.weight || inputs.label_smoothing == 0) return;
  owned.weight_sum = torch::stable::sum(*owned.weight);
  args.weight_sum = owned.weight_sum->const_data_ptr();
}

// Views a shard of the classes, which may be empty.
inline void view_shard(const Arguments& inputs, int64_t first_class, CrossEntropyArgs& args) {
  check_shard(inputs.num_classes, first_class);
  args.first_class = first_class;
  args.vocab += first_class;
  inputs.check_options(std::numeric_limits<int64_t>::max(), "the classes of all shards");
}

// `strided` is true if the op supports rows with strided classes, (outer, inner, vocab).
inline void view_call(const Tensor& logits, const Arguments& inputs, Owned& owned, CrossEntropyArgs& args,
                      bool strided = false, std::optional<int64_t> first_class = std::nullopt) {
  if (strided && logits.dim() == 3)
    view_strided_logits(logits, owned, args);
  else
    view_logits(logits, owned, args);
  if (first_class) {
    view_shard(inputs, *first_class, args);
  } else {
    check(args.vocab > 0, "logits must have at least one class, got ", shape(logits));
    inputs.check_options(args.vocab, "the columns of logits");
  }
  view_arguments(inputs, owned, args);
}

// Views the row arguments of a backward. `like` has the device, dtype and rows of the logits.
inline BackwardArgs view_grad_outputs(const CrossEntropyArgs& rows, const Tensor& like, const OptionalTensor& grad_loss,
                                      const OptionalTensor& grad_lse, const Tensor& lse,
                                      const OptionalTensor& lse_residual) {
  BackwardArgs args{};
  static_cast<CrossEntropyArgs&>(args) = rows;
  int64_t stride = 1;
  if (grad_loss) args.grad_loss = view_rows(*grad_loss, like, "grad_loss", args.grad_loss_stride);
  if (grad_lse) args.grad_lse = view_rows(*grad_lse, like, "grad_lse", args.grad_lse_stride);
  args.lse = view_rows(lse, like, "lse", stride);
  check(args.rows <= 1 || stride == 1, "lse must be contiguous, got stride ", stride);
  if (lse_residual) {
    args.lse_residual = view_rows(*lse_residual, like, "lse_residual", stride);
    check(args.rows <= 1 || stride == 1, "lse_residual must be contiguous, got stride ", stride);
  }
  return args;
}

// Checks logits (outer, inner, vocab): the stride of each dimension must exceed the span of the denser ones.
inline void check_strided_overwritable(const Tensor& logits, const CrossEntropyArgs& args) {
  check(args.logits == origin(logits), "logits must have inner stride 1 to be overwritten, got ", logits.stride(1));
  std::pair<int64_t, int64_t> by_stride[3];
  for (int64_t i = 0; i < 3; ++i) by_stride[i] = {logits.size(i) > 1 ? logits.stride(i) : 0, logits.size(i)};
  std::sort(by_stride, by_stride + 3);
  int64_t spanned = 1;
  for (const auto& [stride, size] : by_stride) {
    if (size <= 1) continue;
    check(stride >= spanned, "logits must have non-overlapping rows to be overwritten, got strides [", logits.stride(0),
          ", ", logits.stride(1), ", ", logits.stride(2), "]");
    spanned += stride * (size - 1);
  }
}

// Checks that a gradient can overwrite `logits`.
inline void check_overwritable(const Tensor& logits, const CrossEntropyArgs& args) {
  if (logits.dim() == 3) return check_strided_overwritable(logits, args);
  check(args.rows <= 1 || args.row_stride >= args.vocab - args.first_class,
        "logits must have non-overlapping rows to be overwritten, got row stride ", args.row_stride);
  check(args.logits == origin(logits), "logits must have column stride 1 to be overwritten, got ", logits.stride(1));
}

// Checks the tensors that are read, other than the logits, while `overwritten` is written.
inline void check_apart(const Overwritten& overwritten, const TargetArguments& inputs) {
  overwritten.check_apart(inputs.indices, "indices", inputs.values, "values", inputs.offsets, "offsets", inputs.weight,
                          "weight", inputs.row_mask, "row_mask");
}
inline void check_apart(const Overwritten& overwritten, const Arguments& inputs) {
  check_apart(overwritten, static_cast<const TargetArguments&>(inputs));
  overwritten.check_apart(inputs.row_scale, "row_scale");
}

// Views the arguments of loss_mean. The class weights, if there are any, bound the indices.
inline LossMeanArgs view_loss_mean(const Tensor& loss, const OptionalTensor& normalizer, const TargetArguments& inputs,
                                   const OptionalTensor& row_weight, Owned& owned) {
  check(loss.dim() == 1, "loss must be (rows,), got ", shape(loss));
  LossMeanArgs args{};
  args.dtype = to_dtype(loss, "loss", /*integer=*/false);
  check(loss.scalar_type() == arithmetic_dtype(loss), "loss must be of dtype float32 or float64, got ",
        name(loss.scalar_type()));
  owned.logits = loss;
  const bool weighted = inputs.weight && inputs.weight->dim() == 1;
  args.target = view_target(inputs, weighted ? inputs.weight->size(0) : std::numeric_limits<int64_t>::max(), owned);
  args.loss = origin(loss);
  args.loss_stride = loss.stride(0);
  args.normalizer = normalizer ? view_scalar(*normalizer, loss, "normalizer") : nullptr;
  if (row_weight) args.row_weight = view_rows(*row_weight, loss, "row_weight", args.row_weight_stride);
  return args;
}

// Returns true if any index is not a class. Most targets have neither padding nor errors, so one cheap pass suffices.
inline bool any_outside(const TargetView& target) {
  return with_index(target.indices_dtype, [&](auto index) {
    const auto* indices = static_cast<const decltype(index)*>(target.indices);
    bool outside = false;
    for (int64_t i = 0; i < target.entries; ++i)
      outside |= static_cast<uint64_t>(indices[i]) >= static_cast<uint64_t>(target.num_classes);
    return outside;
  });
}

// Raises an error for the first entry whose index is out of range. `target` points to host memory.
inline void check_entries(const TargetView& target) {
  const bool outside = any_outside(target);
  if (!target.offsets && !outside) return;
  for (int64_t r = 0; r < target.rows; ++r) {
    if (target.ignored(r)) continue;
    const EntryRange range = target.row(r);
    check(range.valid, "target must have offsets with 0 <= begin <= end <= ", target.entries,
          ", got an invalid range in row ", r);
    if (!outside) continue;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const auto entry = target.entry<double>(i);
      if (entry.column < 0 && entry.value != 0) {
        const int64_t index = load_int(target.indices, target.indices_dtype, i);
        if (index >= 0 && index < target.num_classes) continue;  // the weight is NaN, and so is the loss
        const std::string fix = index < 0 ? "; mark padding with " + std::to_string(target.ignore_index) : "";
        fail("target must have indices in [0, ", target.num_classes, ") or ignore_index ", target.ignore_index,
             ", got ", index, " in row ", r, fix);
      }
    }
  }
}

}  // namespace sparse_ce
