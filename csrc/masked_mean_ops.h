// masked_mean_ops.h - the ops on tensors, for the CPU and for CUDA alike. `device_t` has masked_mean,
// masked_mean_backward, and empty_output for the large fresh gradient.
#pragma once

#include "boxing.h"
#include "masked_mean.h"

#include <tuple>
#include <vector>

namespace sparse_ce {

// `number`: the arithmetic dtype.
inline DType to_mask_dtype(const Tensor& mask, ScalarType number) {
  const ScalarType dtype = mask.scalar_type();
  if (dtype == ScalarType::Bool || dtype == ScalarType::Byte) return DType::kUInt8;
  check(dtype == number, "mask must be of dtype bool, uint8 or ", name(number), ", got ", name(dtype));
  return to_dtype(mask, "mask", /*integer=*/false);
}

// Which dimensions of a mask are reduced, and what is left of the others.
struct Reduction {
  std::vector<bool> reduced;
  std::vector<int64_t> kept;  // sizes

  Reduction(const Tensor& mask, const std::vector<int64_t>& dim) : reduced(static_cast<size_t>(mask.dim())) {
    for (const int64_t d : dim) {
      if (d < 0 || d >= mask.dim() || reduced[static_cast<size_t>(d)])
        fail("dim must be distinct dimensions in [0, ", mask.dim(), "), got ", d);
      reduced[static_cast<size_t>(d)] = true;
    }
    for (size_t d = 0; d < reduced.size(); ++d)
      if (!reduced[d]) kept.push_back(mask.size(static_cast<int64_t>(d)));
  }

  // Merges the dimensions of `t`, the input or its gradient, into args' axes. False if they do not fit.
  bool fits(const Tensor& t, const Tensor& mask, MaskedMeanArgs& args) const {
    std::vector<Axis> axes;  // innermost first
    int64_t out = 1;
    for (int64_t d = t.dim(); d-- > 0;) {
      const bool reduce = reduced[static_cast<size_t>(d)];
      const Axis axis{t.size(d), {t.stride(d), mask.stride(d), reduce ? 0 : out}};
      if (!reduce) out *= axis.size;
      if (axis.size == 1) continue;
      const Place end = axes.empty() ? Place{} : Place{}.moved(axes.back().stride, axes.back().size);
      if (!axes.empty() && end.input == axis.stride.input && end.mask == axis.stride.mask &&
          end.out == axis.stride.out)  // one that is kept and one that is reduced differ in `out`
        axes.back().size *= axis.size;
      else
        axes.push_back(axis);
    }
    args.outer = args.rows = Axis{};
    args.columns = axes.empty() ? Axis{1, {1, 1, 0}} : axes.front();
    for (size_t i = 1; i < axes.size(); ++i) {
      Axis& into = axes[i].stride.out != 0 ? args.outer : args.rows;
      if (into.size != 1) return false;
      into = axes[i];
    }
    const Place& step = args.columns.stride;
    return step.input == 1 && (step.mask == 0 || step.mask == 1);
  }

  // The same, with packed copies in place of the mask, or of both, where they did not fit.
  void view(Tensor& t, Tensor& mask, MaskedMeanArgs& args) const {
    if (fits(t, mask, args)) return;
    mask = packed(mask);
    if (fits(t, mask, args)) return;
    t = packed(t);
    check(fits(t, mask, args), "dim must leave at most three runs of dimensions that are kept or reduced");
  }
};

template <typename device_t>
struct MaskedMeanOps {
  static std::tuple<Tensor, Tensor> masked_mean(Tensor input, Tensor mask, std::vector<int64_t> dim) {
    MaskedMeanArgs args{};
    args.dtype = to_dtype(input, "input", /*integer=*/false);
    check_same_device(mask, input, "mask");
    if (!same_sizes(mask.sizes(), input.sizes()))
      fail("mask must have the shape of input, ", shape(input), ", got ", shape(mask));
    const Reduction reduction(mask, dim);
    Tensor mean = torch::stable::new_empty(input, reduction.kept, input.scalar_type());
    Tensor divisor = torch::stable::new_empty(input, reduction.kept, arithmetic_dtype(input));
    if (input.numel() == 0) return {torch::stable::fill_(mean, 0), torch::stable::fill_(divisor, 1)};
    args.mask_dtype = to_mask_dtype(mask, divisor.scalar_type());
    reduction.view(input, mask, args);
    args.input = input.const_data_ptr();
    args.mask = mask.const_data_ptr();
    args.mean = mean.mutable_data_ptr();
    args.divisor = divisor.mutable_data_ptr();
    device_t::masked_mean(args, input);
    return {mean, divisor};
  }

  static Tensor masked_mean_backward(Tensor share, Tensor mask, std::vector<int64_t> dim, ScalarType dtype) {
    MaskedMeanArgs args{};
    check_same_device(share, mask, "share");
    const Reduction reduction(mask, dim);
    if (!same_sizes(share.sizes(), reduction.kept)) fail("share must have the shape of the mean, got ", shape(share));
    Tensor grad_input = torch::stable::view(device_t::empty_output(mask, {mask.numel()}, dtype), mask.sizes());
    args.dtype = to_dtype(grad_input, "dtype", /*integer=*/false);
    if (share.scalar_type() != arithmetic_dtype(grad_input))
      fail("share must be of dtype ", name(arithmetic_dtype(grad_input)), ", got ", name(share.scalar_type()));
    if (mask.numel() == 0) return grad_input;
    const Tensor packed_share = packed(share);
    args.mask_dtype = to_mask_dtype(mask, share.scalar_type());
    reduction.view(grad_input, mask, args);
    args.mask = mask.const_data_ptr();
    args.share = packed_share.const_data_ptr();
    args.grad_input = grad_input.mutable_data_ptr();
    device_t::masked_mean_backward(args, mask);
    return grad_input;
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("masked_mean", boxed<&masked_mean>);
    m.impl("masked_mean_backward", boxed<&masked_mean_backward>);
  }
};

}  // namespace sparse_ce
