// masked_mean_ops.h - Implements the masked mean ops on tensors, for CPU and CUDA.
#pragma once

#include "boxing.h"
#include "device.h"

#include <tuple>
#include <vector>

namespace sparse_ce {

// Returns the sizes of the dimensions of a mask that are not reduced.
inline std::vector<int64_t> kept_sizes(const Tensor& mask, const std::vector<int64_t>& dim) {
  std::vector<int64_t> kept, times(static_cast<size_t>(mask.dim()));
  for (const int64_t d : dim)
    if (d < 0 || d >= mask.dim() || times[static_cast<size_t>(d)]++ > 0)
      fail("dim must be distinct dimensions in [0, ", mask.dim(), "), got ", d);
  for (int64_t d = 0; d < mask.dim(); ++d)
    if (times[static_cast<size_t>(d)] == 0) kept.push_back(mask.size(d));
  return kept;
}

// Merges the dimensions of `t`, the input or its gradient, into the axes of `args`. Returns false if they do not fit.
inline bool fits(const Tensor& t, const Tensor& mask, const std::vector<int64_t>& dim, MaskedMeanArgs& args) {
  args.outer = args.rows = args.columns = Axis{};
  Axis* last = nullptr;
  for (int64_t d = t.dim(), out = 1; d-- > 0;) {
    const bool kept = std::count(dim.begin(), dim.end(), d) == 0;
    const Place stride{t.stride(d), mask.stride(d), kept ? out : 0};
    if (t.size(d) == 1) continue;
    // A kept and a reduced dimension always differ in `out`.
    if (!last || Place{}.moved(last->stride, last->size) != stride) {
      last = !last ? &args.columns : kept ? &args.outer : &args.rows;
      if (last->size != 1) return false;
      last->stride = stride;
    }
    last->size *= t.size(d);
    if (kept) out *= t.size(d);
  }
  return !last || (args.columns.stride.input == 1 && (args.columns.stride.mask == 0 || args.columns.stride.mask == 1));
}

// Sets `args` to view `t` and the mask. Copies the mask, or both tensors, to packed memory if they do not fit.
inline void view(Tensor& t, Tensor& mask, const std::vector<int64_t>& dim, MaskedMeanArgs& args) {
  const ScalarType dtype = mask.scalar_type(), number = arithmetic_dtype(t);
  const bool bytes = dtype == ScalarType::Bool || dtype == ScalarType::Byte;
  check(bytes || dtype == number, "mask must be of dtype bool, uint8 or ", name(number), ", got ", name(dtype));
  args.selects = dtype == ScalarType::Bool;
  args.mask_dtype = bytes ? DType::kUInt8 : to_dtype(mask, "mask", /*integer=*/false);
  const bool fit =
      fits(t, mask, dim, args) || fits(t, mask = packed(mask), dim, args) || fits(t = packed(t), mask, dim, args);
  check(fit, "dim must split the dimensions into at most three runs that are kept or reduced");
  args.mask = mask.const_data_ptr();
}

template <typename device_t>
struct MaskedMeanOps {
  static std::tuple<Tensor, Tensor> masked_mean(Tensor input, Tensor mask, std::vector<int64_t> dim) {
    MaskedMeanArgs args{};
    args.dtype = to_dtype(input, "input", /*integer=*/false);
    check_same_device(mask, input, "mask");
    if (!same_sizes(mask.sizes(), input.sizes()))
      fail("mask must have the shape of input, ", shape(input), ", got ", shape(mask));
    const std::vector<int64_t> kept = kept_sizes(mask, dim);
    Tensor mean = torch::stable::new_empty(input, kept, input.scalar_type());
    Tensor divisor = torch::stable::new_empty(input, kept, arithmetic_dtype(input));
    if (input.numel() == 0) return {torch::stable::fill_(mean, 0), torch::stable::fill_(divisor, 1)};
    view(input, mask, dim, args);
    args.input = input.const_data_ptr();
    args.mean = mean.mutable_data_ptr();
    args.divisor = divisor.mutable_data_ptr();
    device_t().masked_mean(args, input);
    return {mean, divisor};
  }

  static Tensor masked_mean_backward(Tensor share, Tensor mask, std::vector<int64_t> dim, ScalarType dtype) {
    MaskedMeanArgs args{};
    check_same_device(share, mask, "share");
    check(same_sizes(share.sizes(), kept_sizes(mask, dim)), "share must have the shape of the mean, got ",
          shape(share));
    args.dtype = to_dtype(dtype, "dtype", /*integer=*/false);
    if (share.scalar_type() != arithmetic_dtype(dtype))
      fail("share must be of dtype ", name(arithmetic_dtype(dtype)), ", got ", name(share.scalar_type()));
    Tensor grad_input = torch::stable::view(device_t().empty_output(mask, {mask.numel()}, dtype), mask.sizes());
    if (mask.numel() == 0) return grad_input;
    const Tensor packed_share = packed(share);
    view(grad_input, mask, dim, args);
    args.share = packed_share.const_data_ptr();
    args.grad_input = grad_input.mutable_data_ptr();
    device_t().masked_mean_backward(args, mask);
    return grad_input;
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("masked_mean", boxed<&masked_mean>);
    m.impl("masked_mean_backward", boxed<&masked_mean_backward>);
  }
};

}  // namespace sparse_ce
