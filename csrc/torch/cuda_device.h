// cuda_device.h - Defines torch's interface to the device: its current stream, its GEMMs and its dispatch key. The
// include guard is a macro, so that the emulated device can replace this file.
#ifndef SPARSE_CE_TORCH_CUDA_DEVICE
#define SPARSE_CE_TORCH_CUDA_DEVICE

#include "gemm.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#define SCE_DISPATCH_KEY CUDA

namespace sparse_ce {
namespace cuda {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t stream_of(const Tensor& t) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Holds the memory of the tensor's device in bytes, or 0 if it is unknown, for all calls of the process. The caller may
// reduce it.
inline std::atomic<int64_t>& memory_of(const Tensor& t) {
  static std::array<std::atomic<int64_t>, 128> memory{};  // PyTorch supports fewer devices
  std::atomic<int64_t>& of_device = memory[static_cast<size_t>(t.get_device_index())];
  if (of_device == 0) {
    const DeviceGuard guard(t.get_device_index());
    size_t unused = 0, total = 0;
    int64_t unknown = 0;
    if (cudaMemGetInfo(&unused, &total) == cudaSuccess)
      of_device.compare_exchange_strong(unknown, static_cast<int64_t>(total));
    else
      cudaGetLastError();
  }
  return of_device;
}

using sparse_ce::multiply;
constexpr auto add_product = aoti_torch_cuda_addmm_out;

// Computes out = a b for 16-bit a and b, with the GEMM's float32 accumulators as output.
inline void multiply_widening(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 4> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(ScalarType::Float), torch::stable::detail::from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype_out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

// Copies a matrix with packed rows to one of the same dtype. PyTorch's copy moves these one element at a time.
inline cudaError_t copy_matrix(const Tensor& to, const Tensor& from) {
  const auto bytes = [&](int64_t elements) { return static_cast<size_t>(elements * to.element_size()); };
  return cudaMemcpy2DAsync(to.mutable_data_ptr(), bytes(to.stride(0)), from.const_data_ptr(), bytes(from.stride(0)),
                           bytes(to.size(1)), static_cast<size_t>(to.size(0)), cudaMemcpyDeviceToDevice, stream_of(to));
}

}  // namespace cuda
}  // namespace sparse_ce

#endif
