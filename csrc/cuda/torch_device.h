// cuda/torch_device.h - torch's side of the device: its current stream, its products, its dispatch key. Guarded by a
// name, so that another device may stand in for it.
#ifndef SPARSE_CE_CUDA_TORCH_DEVICE
#define SPARSE_CE_CUDA_TORCH_DEVICE

#include "../tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>

#include <cuda_runtime_api.h>

#define SCE_DISPATCH_KEY CUDA

namespace sparse_ce {
namespace cuda {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t stream_of(const Tensor& t) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

constexpr auto kAddmmOut = aoti_torch_cuda_addmm_out;
constexpr bool kWideningProducts = true;  // of 16 bits into float32

}  // namespace cuda
}  // namespace sparse_ce

#endif
