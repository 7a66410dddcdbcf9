// linear/products.h - the products of the linear head, and their sums over chunks of rows or blocks of classes.
// `device_t` as for linear/head.h.
#pragma once

#include "../../ops/linear.h"
#include "../tensors.h"

namespace sparse_ce {

template <typename device_t>
class LinearProducts {
 public:
  // Of matrices of the `work` dtype.
  explicit LinearProducts(ScalarType work) : work_(work) {}

  // Of what a product is before it is summed.
  ScalarType dtype() const { return device_t::kWidens && size_in_bytes(work_) == 2 ? ScalarType::Float : work_; }
  // Whether a total is exactly that, and whether it can stay in the GEMM's hands.
  bool holds(ScalarType total) const { return total == dtype() && size_in_bytes(total) > 2; }
  bool plain(ScalarType total) const { return total == work_ && size_in_bytes(total) > 2; }
  // Whether a single product has no need of memory beside its total.
  bool direct(ScalarType total) const { return total == work_ || holds(total); }

  void multiply(const Tensor& out, const Tensor& a, const Tensor& b) const {
    if constexpr (device_t::kWidens)
      if (out.scalar_type() != work_) return device_t::multiply_widening(out, a, b);
    device_t::multiply(out, a, b);
  }

  // total += a b, or = a b for the first of several. `low` holds what a total of 16 bits has no room for until the
  // last; `buffer()` is room for a product.
  template <typename buffer_t>
  void add(const Tensor& total, const OptionalTensor& low, const Tensor& a, const Tensor& b, bool first, bool last,
           const buffer_t& buffer) const {
    const ScalarType dtype = total.scalar_type();
    if (first && (last ? direct(dtype) : holds(dtype))) return multiply(total, a, b);
    if (plain(dtype)) return device_t::add_product(total, total, a, b);
    const Tensor product = buffer();
    multiply(product, a, b);
    AccumulateArgs args{};
    args.product = product.const_data_ptr();
    args.product_dtype = to_dtype(product, "product", /*integer=*/false);
    args.total = total.mutable_data_ptr();
    args.dtype = to_dtype(total, "total", /*integer=*/false);
    args.low = low ? static_cast<uint8_t*>(low->mutable_data_ptr()) : nullptr;
    args.count = total.numel();
    args.first = first;
    args.last = last;
    device_t::accumulate(args, total);
  }

 private:
  ScalarType work_;
};

}  // namespace sparse_ce
