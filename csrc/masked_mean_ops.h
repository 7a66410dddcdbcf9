// masked_mean_ops.h - the ops on tensors, for the CPU and for CUDA alike. `device_t` has masked_mean,
// masked_mean_backward, and empty_output for the large fresh gradient.
#pragma once

#include "boxing.h"
#include "masked_mean.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <vector>

namespace sparse_ce {

inline DType to_mask_dtype(const Tensor& mask) {
  const ScalarType dtype = mask.scalar_type();
  if (dtype == ScalarType::Bool || dtype == ScalarType::Byte) return DType::kUInt8;
  return to_dtype(mask, "mask", /*integer=*/dtype == ScalarType::Int || dtype == ScalarType::Long);
}

struct MaskedAxis {
  int64_t size;
  Place stride;
  bool kept;
};

using Order = std::vector<int64_t>;  // dimensions, outermost first

// Dimensions whose step through the tensor is longer come first, and first of all those that repeat it.
inline Order by_step(const Tensor& t) {
  const Sizes strides = t.strides();
  Order order(strides.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = static_cast<int64_t>(d);
  const auto step = [&](int64_t d) { return static_cast<uint64_t>(strides[static_cast<size_t>(d)]) - 1; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return step(a) > step(b); });
  return order;
}

inline Order kept_first(const std::vector<bool>& reduced) {
  Order order;
  for (const bool last : {false, true})
    for (size_t d = 0; d < reduced.size(); ++d)
      if (reduced[d] == last) order.push_back(static_cast<int64_t>(d));
  return order;
}

inline Tensor permute(const Tensor& t, const Order& order) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(t), torch::stable::detail::from(order)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::permute", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The same tensor, packed with its dimensions in a given order.
inline Tensor repacked(const Tensor& t, const Order& order) {
  Order inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  return permute(packed(permute(t, order)), inverse);
}

// Merges the dimensions of `t`, the input or its gradient, and says whether the kernels can take what is left.
inline bool make_nest(const Tensor& t, const Tensor& mask, const std::vector<bool>& reduced, MaskedMeanArgs& args) {
  const Sizes sizes = t.sizes(), strides = t.strides(), mask_strides = mask.strides();
  std::vector<MaskedAxis> all(reduced.size()), axes;
  int64_t out = 1;
  for (size_t d = reduced.size(); d-- > 0;) {
    all[d] = {sizes[d], {strides[d], mask_strides[d], reduced[d] ? 0 : out}, !reduced[d]};
    if (!reduced[d]) out *= sizes[d];
  }
  for (const int64_t d : by_step(t)) {
    const MaskedAxis& inner = all[static_cast<size_t>(d)];
    if (inner.size == 1) continue;
    const Place whole = Place{}.moved(inner.stride, inner.size);
    if (!axes.empty() && axes.back().stride.input == whole.input && axes.back().stride.mask == whole.mask &&
        axes.back().stride.out == whole.out)  // an axis that is kept and one that is not differ in `out`
      axes.back() = {axes.back().size * inner.size, inner.stride, inner.kept};
    else
      axes.push_back(inner);
  }
  if (axes.empty()) axes.push_back({1, {1, 1, 0}, false});
  args.columns = axes.back().size;
  args.column = axes.back().stride;
  args.columns_kept = axes.back().kept;
  args.outer = args.rows = Axes{};
  axes.pop_back();
  for (const MaskedAxis& axis : axes) {
    Axes& into = axis.kept ? args.outer : args.rows;
    if (into.dims == kMostAxes) return false;
    into.size[into.dims] = axis.size;
    into.stride[into.dims++] = axis.stride;
    into.count *= axis.size;
  }
  return args.column.input == 1 && (args.column.mask == 0 || args.column.mask == 1) && args.column.out <= 1;
}

// The same, with copies in place of the mask, or of both, where the kernels could not take them.
inline void view_masked(Tensor& t, Tensor& mask, const std::vector<bool>& reduced, MaskedMeanArgs& args) {
  args.mask_dtype = to_mask_dtype(mask);
  if (make_nest(t, mask, reduced, args)) return;
  const Tensor given = mask;
  mask = repacked(given, by_step(t));
  if (make_nest(t, mask, reduced, args)) return;
  t = repacked(t, kept_first(reduced));
  mask = repacked(given, kept_first(reduced));
  make_nest(t, mask, reduced, args);
}

template <typename device_t>
struct MaskedMeanOps {
  static std::tuple<Tensor, Tensor> masked_mean(Tensor input, Tensor mask, std::vector<int64_t> dim) {
    MaskedMeanArgs args{};
    args.dtype = to_dtype(input, "input", /*integer=*/false);
    check_same_device(mask, input, "mask");
    if (!same_sizes(mask.sizes(), input.sizes()))
      fail("mask must have the shape of input, ", shape(input), ", got ", shape(mask));
    const auto [reduced, size] = split(mask, dim);
    Tensor mean = torch::stable::new_empty(input, size, input.scalar_type());
    Tensor divisor = torch::stable::new_empty(input, size, arithmetic_dtype(input));
    if (input.numel() == 0) return {torch::stable::fill_(mean, 0), torch::stable::fill_(divisor, 1)};
    view_masked(input, mask, reduced, args);
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
    const auto [reduced, size] = split(mask, dim);
    if (!same_sizes(share.sizes(), size)) fail("share must have the shape of the mean, got ", shape(share));
    Tensor grad_input = torch::stable::view(device_t::empty_output(mask, {mask.numel()}, dtype), mask.sizes());
    args.dtype = to_dtype(grad_input, "dtype", /*integer=*/false);
    if (share.scalar_type() != arithmetic_dtype(grad_input))
      fail("share must be of dtype ", name(arithmetic_dtype(grad_input)), ", got ", name(share.scalar_type()));
    if (mask.numel() == 0) return grad_input;
    const Tensor packed_share = packed(share);
    view_masked(grad_input, mask, reduced, args);
    args.mask = mask.const_data_ptr();
    args.share = packed_share.const_data_ptr();
    args.grad_input = grad_input.mutable_data_ptr();
    device_t::masked_mean_backward(args, mask);
    return packed(grad_input);
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("masked_mean", boxed<&masked_mean>);
    m.impl("masked_mean_backward", boxed<&masked_mean_backward>);
  }

 private:
  // Which dimensions are reduced, and the sizes of the others.
  static std::tuple<std::vector<bool>, std::vector<int64_t>> split(const Tensor& mask,
                                                                   const std::vector<int64_t>& dim) {
    std::vector<bool> reduced(static_cast<size_t>(mask.dim()));
    for (const int64_t d : dim) {
      if (d < 0 || d >= mask.dim() || reduced[static_cast<size_t>(d)])
        fail("dim must be distinct dimensions in [0, ", mask.dim(), "), got ", d);
      reduced[static_cast<size_t>(d)] = true;
    }
    std::vector<int64_t> kept;
    for (size_t d = 0; d < reduced.size(); ++d)
      if (!reduced[d]) kept.push_back(mask.size(static_cast<int64_t>(d)));
    return {reduced, kept};
  }
};

}  // namespace sparse_ce
