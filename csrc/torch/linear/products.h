// linear/products.h - Runs the GEMMs of the linear head and accumulates them over chunks of rows or blocks of classes.
#pragma once

#include "../device.h"

namespace sparse_ce {

template <typename device_t>
class LinearProducts {
 public:
  // The matrices have the `work` dtype.
  explicit LinearProducts(ScalarType work) : work_(work) {}

  // Returns the dtype of a product before it is accumulated.
  ScalarType dtype() const { return device_t().product_dtype(work_); }
  // Return true if a total can hold a product without rounding, and if the GEMM itself can accumulate into the total.
  bool holds(ScalarType total) const { return total == dtype() && size_in_bytes(total) > 2; }
  bool plain(ScalarType total) const { return total == work_ && size_in_bytes(total) > 2; }
  // Returns true if a single product needs no memory other than its total.
  bool direct(ScalarType total) const { return total == work_ || holds(total); }
  // Returns true if `add` needs no memory other than its total.
  bool in_place(ScalarType total, bool first, bool last) const { return plain(total) || replaces(total, first, last); }

  void multiply(const Tensor& out, const Tensor& a, const Tensor& b) const { device_t().multiply(out, a, b); }

  // Computes total += a b, or total = a b for the first product. `low` holds the low bits of a 16-bit total until the
  // last product. `buffer()` returns memory for a product.
  template <typename buffer_t>
  void add(const Tensor& total, const OptionalTensor& low, const Tensor& a, const Tensor& b, bool first, bool last,
           const buffer_t& buffer) const {
    const ScalarType dtype = total.scalar_type();
    if (replaces(dtype, first, last)) return multiply(total, a, b);
    if (plain(dtype)) return device_t().add_product(total, total, a, b);
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
    device_t().accumulate(args, total);
  }

 private:
  bool replaces(ScalarType total, bool first, bool last) const {
    return first && (last ? direct(total) : holds(total));
  }

  ScalarType work_;
};

}  // namespace sparse_ce
