// torch_device.h - stands in for csrc/cuda/torch_device.h: the emulated kernels serve tensors of the CPU.
#define SPARSE_CE_CUDA_TORCH_DEVICE

#include "../../../csrc/gemm.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>

#include <string>

#define SCE_DISPATCH_KEY CPU

namespace sparse_ce {
namespace cuda {

struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
inline cudaStream_t stream_of(const Tensor&) { return nullptr; }

constexpr auto kAddmmOut = aoti_torch_cpu_addmm_out;

// A CPU's mm has no wider result: its operands are widened.
inline void multiply_widening(const Tensor& out, const Tensor& a, const Tensor& b) {
  multiply(out, torch::stable::to(a, ScalarType::Float), torch::stable::to(b, ScalarType::Float));
}

inline std::string instruction_set() { return "emulated CUDA"; }

}  // namespace cuda
}  // namespace sparse_ce

STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&sparse_ce::cuda::instruction_set));
}
