// masked_mean_ops.h - the ops on tensors, for the CPU and for CUDA alike. `device_t` has masked_mean,
// masked_mean_backward, and empty_output for the large fresh gradient.
#pragma once

#include "masked_mean.h"
#include "tensors.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

namespace sparse_ce {

struct MaskedAxis {
  int64_t size;
  Place stride;
  bool kept;
};

// The axes of the nest, outermost first: by their step through the input, neighbours merged where one step of the outer
// is all the steps of the inner.
inline std::vector<MaskedAxis> merge_axes(std::vector<MaskedAxis> axes) {
  const auto step = [](const MaskedAxis& axis) {  // an axis that repeats the input goes outside
    return axis.stride.input == 0 ? std::numeric_limits<int64_t>::max() : axis.stride.input;
  };
  std::stable_sort(axes.begin(), axes.end(),
                   [&](const MaskedAxis& a, const MaskedAxis& b) { return step(a) > step(b); });
  std::vector<MaskedAxis> merged;
  for (const MaskedAxis& inner : axes) {
    if (inner.size == 1) continue;
    if (!merged.empty()) {  // an axis that is kept and one that is not differ in `out`
      MaskedAxis& outer = merged.back();
      const Place all = Place{}.moved(inner.stride, inner.size);
      if (outer.stride.input == all.input && outer.stride.mask == all.mask && outer.stride.out == all.out) {
        outer.size *= inner.size;
        outer.stride = inner.stride;
        continue;
      }
    }
    merged.push_back(inner);
  }
  return merged;
}

inline void make_nest(const std::vector<MaskedAxis>& all, MaskedMeanArgs& args) {
  std::vector<MaskedAxis> axes = merge_axes(all);
  if (axes.empty()) axes.push_back({1, {1, 1, 0}, false});
  const MaskedAxis columns = axes.back();
  axes.pop_back();
  args.columns = columns.size;
  args.column = columns.stride;
  args.columns_kept = columns.kept;
  for (const MaskedAxis& axis : axes) {
    Axes& into = axis.kept ? args.outer : args.rows;
    check(into.dims < kMostAxes, "input must have at most ", kMostAxes,
          " dimensions that are reduced, and as many that are not, got more; call input.contiguous()");
    into.size[into.dims] = axis.size;
    into.stride[into.dims++] = axis.stride;
    into.count *= axis.size;
  }
}

inline DType to_mask_dtype(const Tensor& mask) {
  switch (mask.scalar_type()) {
    case ScalarType::Bool:
    case ScalarType::Byte:
      return DType::kUInt8;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Long:
      return DType::kInt64;
    default:
      return to_dtype(mask, "mask", /*integer=*/false);
  }
}

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline bool same_sizes(Sizes a, Sizes b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

template <typename device_t>
struct MaskedMeanOps {
  static std::tuple<Tensor, Tensor> masked_mean(Tensor input, Tensor mask, std::vector<int64_t> dim) {
    MaskedMeanArgs args{};
    args.dtype = to_dtype(input, "input", /*integer=*/false);
    check_same_device(mask, input, "mask");
    if (!same_sizes(mask.sizes(), input.sizes()))
      fail("mask must have the shape of input, ", shape(input), ", got ", shape(mask));
    const std::vector<bool> reduced = reduced_dims(dim, mask);
    const std::vector<int64_t> size = kept_sizes(mask, reduced);
    if (input.numel() == 0) return nothing(input, size);
    Tensor mean = torch::stable::new_empty(input, size, input.scalar_type());
    Tensor divisor = torch::stable::new_empty(input, size, arithmetic_dtype(input));
    view(mask, reduced, input.strides().data(), args);
    args.input = input.const_data_ptr();
    args.mean = mean.mutable_data_ptr();
    args.divisor = divisor.mutable_data_ptr();
    device_t::masked_mean(args, input);
    return {mean, divisor};
  }

  static Tensor masked_mean_backward(Tensor share, Tensor mask, std::vector<int64_t> dim, ScalarType dtype) {
    MaskedMeanArgs args{};
    check_same_device(share, mask, "share");
    const std::vector<bool> reduced = reduced_dims(dim, mask);
    const std::vector<int64_t> size = kept_sizes(mask, reduced);
    if (!same_sizes(share.sizes(), size)) fail("share must have the shape of the mean, got ", shape(share));
    Tensor grad_input = torch::stable::view(device_t::empty_output(mask, {mask.numel()}, dtype), mask.sizes());
    args.dtype = to_dtype(grad_input, "dtype", /*integer=*/false);
    if (share.scalar_type() != arithmetic_dtype(grad_input))
      fail("share must be of dtype ", name(arithmetic_dtype(grad_input)), ", got ", name(share.scalar_type()));
    if (mask.numel() == 0) return grad_input;
    const Tensor packed_share = packed(share);
    view(mask, reduced, grad_input.strides().data(), args);
    args.share = packed_share.const_data_ptr();
    args.grad_input = grad_input.mutable_data_ptr();
    device_t::masked_mean_backward(args, mask);
    return grad_input;
  }

 private:
  static std::tuple<Tensor, Tensor> nothing(const Tensor& input, const std::vector<int64_t>& size) {
    Tensor divisor = torch::stable::new_empty(input, size, arithmetic_dtype(input));
    return {torch::stable::new_zeros(input, size), torch::stable::fill_(divisor, 1)};
  }

  static std::vector<bool> reduced_dims(const std::vector<int64_t>& dim, const Tensor& mask) {
    std::vector<bool> reduced(static_cast<size_t>(mask.dim()));
    for (const int64_t d : dim) {
      check(0 <= d && d < mask.dim() && !reduced[static_cast<size_t>(d)], "dim must be distinct dimensions in [0, ",
            mask.dim(), "), got ", d);
      reduced[static_cast<size_t>(d)] = true;
    }
    return reduced;
  }

  static std::vector<int64_t> kept_sizes(const Tensor& mask, const std::vector<bool>& reduced) {
    std::vector<int64_t> size;
    for (int64_t d = 0; d < mask.dim(); ++d)
      if (!reduced[static_cast<size_t>(d)]) size.push_back(mask.size(d));
    return size;
  }

  // `strides` are those of the input, or of its gradient.
  static void view(const Tensor& mask, const std::vector<bool>& reduced, const int64_t* strides, MaskedMeanArgs& args) {
    args.mask_dtype = to_mask_dtype(mask);
    args.mask = mask.const_data_ptr();
    std::vector<MaskedAxis> axes(reduced.size());
    int64_t out = 1;
    for (int64_t d = mask.dim() - 1; d >= 0; --d) {
      const bool kept = !reduced[static_cast<size_t>(d)];
      axes[static_cast<size_t>(d)] = {mask.size(d), {strides[d], mask.stride(d), kept ? out : 0}, kept};
      if (kept) out *= mask.size(d);
    }
    make_nest(axes, args);
  }
};

#define SCE_REGISTER_MASKED_MEAN_OPS(m, ops_t)         \
  m.impl("masked_mean", TORCH_BOX(&ops_t::masked_mean)); \
  m.impl("masked_mean_backward", TORCH_BOX(&ops_t::masked_mean_backward))

}  // namespace sparse_ce
