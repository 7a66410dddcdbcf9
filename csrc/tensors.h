// tensors.h - what the ops ask of tensors: their dtype, their device, their memory.
#pragma once

#include "dtype.h"
#include "errors.h"

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <ostream>
#include <string>

// The headers of torch 2.11 and 2.12 can say that a call of torch's failed, but not yet why.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace sparse_ce {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// For messages: made into text where one is printed.
struct Shape {
  const Tensor& of;
};
inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << "[";
  for (int64_t i = 0; i < shape.of.dim(); ++i) out << (i ? ", " : "") << shape.of.size(i);
  return out << "]";
}

inline Shape shape(const Tensor& t) { return {t}; }
inline bool same_sizes(Sizes a, Sizes b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }
inline const char* name(ScalarType dtype) { return torch::headeronly::toString(dtype); }

// Of the dtypes that the ops make.
inline int64_t size_in_bytes(ScalarType dtype) {
  if (dtype == ScalarType::Byte) return 1;
  if (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) return 2;
  return dtype == ScalarType::Float ? 4 : 8;
}

inline DType to_dtype(const Tensor& t, const char* argument, bool integer) {
  const ScalarType dtype = t.scalar_type();
  if (integer && dtype == ScalarType::Int) return DType::kInt32;
  if (integer && dtype == ScalarType::Long) return DType::kInt64;
  if (!integer && dtype == ScalarType::Float) return DType::kFloat32;
  if (!integer && dtype == ScalarType::Double) return DType::kFloat64;
  if (!integer && dtype == ScalarType::Half) return DType::kFloat16;
  if (!integer && dtype == ScalarType::BFloat16) return DType::kBFloat16;
  fail(argument, " must be of dtype ", integer ? "int32 or int64" : "float16, bfloat16, float32 or float64", ", got ",
       name(dtype));
}

inline ScalarType arithmetic_dtype(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_same_device(const Tensor& t, const Tensor& logits, const char* argument) {
  const auto name = [](const Tensor& x) {
    return x.is_cpu() ? std::string("cpu") : "cuda:" + std::to_string(x.get_device_index());
  };
  const bool same = t.is_cpu() == logits.is_cpu() && t.get_device_index() == logits.get_device_index();
  if (!same) fail(argument, " must be on the device of logits, ", name(logits), ", got ", name(t));
}

// A call of the dispatcher only where there is something to copy.
inline Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// What the columns of rows are counted from. Rows without columns may have no memory: theirs are counted from another
// address, from which nothing is read and to which nothing is written, since nothing can be counted from null.
inline char nowhere = 0;
inline const void* origin(const Tensor& rows) { return rows.numel() > 0 ? rows.const_data_ptr() : &nowhere; }
inline void* mutable_origin(const Tensor& rows) { return rows.numel() > 0 ? rows.mutable_data_ptr() : &nowhere; }

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  return torch::stable::new_empty(like, Sizes(size.begin(), size.size()), dtype);
}

// A scalar of the arithmetic dtype of `like`, beside it.
inline const void* view_scalar(const Tensor& t, const Tensor& like, const char* argument) {
  check_same_device(t, like, argument);
  check(t.dim() == 0, argument, " must be (), got ", shape(t));
  check(t.scalar_type() == arithmetic_dtype(like), argument, " must be of dtype ", name(arithmetic_dtype(like)),
        ", got ", name(t.scalar_type()));
  return t.const_data_ptr();
}

// Of logits (rows, classes), or (outer, inner, classes).
inline int64_t rows_of(const Tensor& logits) { return logits.size(0) * (logits.dim() == 3 ? logits.size(1) : 1); }

// A vector (rows,) of the arithmetic dtype with any stride, 0 included.
inline const void* view_rows(const Tensor& t, const Tensor& logits, const char* argument, int64_t& stride) {
  check_same_device(t, logits, argument);
  check(t.dim() == 1 && t.size(0) == rows_of(logits), argument, " must be (", rows_of(logits), ",), got ", shape(t));
  check(t.scalar_type() == arithmetic_dtype(logits), argument, " must be of dtype ", name(arithmetic_dtype(logits)),
        ", got ", name(t.scalar_type()));
  stride = t.stride(0);
  return t.const_data_ptr();
}

}  // namespace sparse_ce
