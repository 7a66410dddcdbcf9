// gemm.h - Calls the vendor's GEMMs through PyTorch. Shapes: a (m, k), b (k, n), out (m, n).
#pragma once

#include "tensors.h"

#include <array>

namespace sparse_ce {

// These return the rows or columns [begin, end) as a view.
inline Tensor rows_of(Tensor t, int64_t begin, int64_t end) { return torch::stable::narrow(t, 0, begin, end - begin); }
inline Tensor columns_of(Tensor t, int64_t begin, int64_t end) {
  return torch::stable::narrow(t, 1, begin, end - begin);
}
inline Tensor transposed(const Tensor& t) { return torch::stable::transpose(t, 0, 1); }

// Returns the tensor without autograd history. GEMMs with `out=` reject tensors that require grad.
inline Tensor detached(const Tensor& t) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(t)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::detach", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Computes out = a b. All tensors have the same dtype.
inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);  // owns the returned handle
}

}  // namespace sparse_ce
