// tensors.h - Provides checks and accessors for the dtype, device and memory of tensors.
#pragma once

#include "../core/dtype.h"
#include "../core/errors.h"
#include "../torch_calls.h"

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace sparse_ce {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Formats a shape for error messages. The text is built only if the message is printed.
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

// Returns the element size of the dtypes that the ops allocate.
inline int64_t size_in_bytes(ScalarType dtype) {
  if (dtype == ScalarType::Byte) return 1;
  if (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) return 2;
  return dtype == ScalarType::Float ? 4 : 8;
}

inline DType to_dtype(ScalarType dtype, const char* argument, bool integer) {
  if (integer && dtype == ScalarType::Int) return DType::kInt32;
  if (integer && dtype == ScalarType::Long) return DType::kInt64;
  if (!integer && dtype == ScalarType::Float) return DType::kFloat32;
  if (!integer && dtype == ScalarType::Double) return DType::kFloat64;
  if (!integer && dtype == ScalarType::Half) return DType::kFloat16;
  if (!integer && dtype == ScalarType::BFloat16) return DType::kBFloat16;
  fail(argument, " must be of dtype ", integer ? "int32 or int64" : "float16, bfloat16, float32 or float64", ", got ",
       name(dtype));
}
inline DType to_dtype(const Tensor& t, const char* argument, bool integer) {
  return to_dtype(t.scalar_type(), argument, integer);
}

inline ScalarType arithmetic_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
inline ScalarType arithmetic_dtype(const Tensor& logits) { return arithmetic_dtype(logits.scalar_type()); }

inline int32_t device_type(const Tensor& t) {
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return type;
}

inline void check_same_device(const Tensor& t, const Tensor& logits, const char* argument) {
  const auto name = [](const Tensor& x) {
    if (x.is_cpu()) return std::string("cpu");
    return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : std::string("another device");
  };
  const bool same = device_type(t) == device_type(logits) && t.get_device_index() == logits.get_device_index();
  if (!same) fail(argument, " must be on the device of logits, ", name(logits), ", got ", name(t));
}

// Calls the dispatcher only if a copy is needed.
inline Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// Returns the address of element 0. A tensor without elements may have no memory; it gets another valid address that is
// never read or written. Null means that the tensor is absent.
inline char nowhere = 0;
inline const void* origin(const Tensor& t) { return t.numel() > 0 ? t.const_data_ptr() : &nowhere; }
inline void* mutable_origin(const Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : &nowhere; }

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  return torch::stable::new_empty(like, Sizes(size.begin(), size.size()), dtype);
}

// Returns the data of a scalar on the device of `like`, in its arithmetic dtype.
inline const void* view_scalar(const Tensor& t, const Tensor& like, const char* argument) {
  check_same_device(t, like, argument);
  check(t.dim() == 0, argument, " must be (), got ", shape(t));
  check(t.scalar_type() == arithmetic_dtype(like), argument, " must be of dtype ", name(arithmetic_dtype(like)),
        ", got ", name(t.scalar_type()));
  return t.const_data_ptr();
}

// Returns the number of rows of logits (rows, classes) or (outer, inner, classes).
inline int64_t rows_of(const Tensor& logits) { return logits.size(0) * (logits.dim() == 3 ? logits.size(1) : 1); }

// Returns the data of a vector (rows,) in the arithmetic dtype. Any stride is allowed, including 0.
inline const void* view_rows(const Tensor& t, const Tensor& logits, const char* argument, int64_t& stride) {
  check_same_device(t, logits, argument);
  check(t.dim() == 1 && t.size(0) == rows_of(logits), argument, " must be (", rows_of(logits), ",), got ", shape(t));
  check(t.scalar_type() == arithmetic_dtype(logits), argument, " must be of dtype ", name(arithmetic_dtype(logits)),
        ", got ", name(t.scalar_type()));
  stride = t.stride(0);
  return origin(t);
}

// Returns the data of a scale, () or (rows,).
inline const void* view_scale(const Tensor& t, const Tensor& logits, const char* argument, int64_t& stride) {
  return t.dim() == 0 ? view_scalar(t, logits, argument) : view_rows(t, logits, argument, stride);
}

// Represents the memory of a tensor that an op overwrites. Its elements must not overlap each other.
class Overwritten {
 public:
  Overwritten(const Tensor& t, const char* argument) : argument_(argument), memory_(t) {}

  void check_apart(const Tensor& other, const char* argument) const {
    const Memory read(other);
    if (read.end <= memory_.begin || memory_.end <= read.begin) return;
    const bool shares = read.any([&](uintptr_t element) {
      for (uintptr_t at = element; at < element + read.bytes; ++at)
        if (memory_.holds(at)) return true;
      return false;
    });
    check(!shares, argument, " must not share memory with ", argument_,
          ", which is overwritten, got overlapping memory; pass a copy");
  }
  void check_apart(const OptionalTensor& other, const char* argument) const {
    if (other) check_apart(*other, argument);
  }
  // Checks several tensors, each followed by its name.
  template <typename tensor_t, typename... others_t>
  void check_apart(const tensor_t& other, const char* argument, const others_t&... others) const {
    check_apart(other, argument);
    check_apart(others...);
  }

 private:
  struct Memory {
    explicit Memory(const Tensor& t)
        : begin(reinterpret_cast<uintptr_t>(t.const_data_ptr())), end(begin), bytes(t.element_size()) {
      if (t.numel() == 0) return;
      for (int64_t d = 0; d < t.dim(); ++d)
        if (t.size(d) > 1) axes.push_back({static_cast<uintptr_t>(t.stride(d)) * bytes, t.size(d) - 1});
      std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
      for (const Axis& axis : axes) end += axis.stride * static_cast<uintptr_t>(axis.last);
      end += bytes;
    }

    // Returns true if the byte belongs to an element. The elements must not overlap.
    bool holds(uintptr_t at) const {
      if (at < begin || at >= end) return false;
      uintptr_t offset = at - begin;
      for (const Axis& axis : axes)
        offset -= axis.stride * std::min(offset / axis.stride, static_cast<uintptr_t>(axis.last));
      return offset < bytes;
    }

    // Returns true if f is true for the address of any element.
    template <typename function_t>
    bool any(const function_t& f) const {
      std::vector<int64_t> index(axes.size());
      for (uintptr_t at = begin;;) {
        if (f(at)) return true;
        size_t d = axes.size();
        for (; d > 0; --d) {
          const Axis& axis = axes[d - 1];
          if (axis.stride > 0 && index[d - 1] < axis.last) break;
          at -= axis.stride * static_cast<uintptr_t>(index[d - 1]);
          index[d - 1] = 0;
        }
        if (d == 0) return false;
        ++index[d - 1];
        at += axes[d - 1].stride;
      }
    }

    struct Axis {
      uintptr_t stride;  // in bytes
      int64_t last;
    };
    uintptr_t begin, end, bytes;
    std::vector<Axis> axes;  // by descending stride
  };

  const char* argument_;
  Memory memory_;
};

}  // namespace sparse_ce
