#include "../linear_ops.h"
#include "../masked_mean_ops.h"
#include "../sparse_softmax_ops.h"
#include "cross_entropy.h"
#include "linear.h"
#include "loss_mean.h"
#include "masked_mean.h"
#include "sparse_softmax.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#ifdef SPARSE_CE_EMULATED
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#endif
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cuda_runtime.h>

#include <cstdlib>
#include <vector>

namespace sparse_ce {
namespace {

#ifdef SPARSE_CE_EMULATED
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
cudaStream_t stream_of(const Tensor&) { return nullptr; }
constexpr bool kWideningProducts = false;
constexpr auto kAddmmOut = aoti_torch_cpu_addmm_out;
#else
constexpr bool kWideningProducts = true;  // a CPU's mm has none
constexpr auto kAddmmOut = aoti_torch_cuda_addmm_out;
using torch::stable::accelerator::DeviceGuard;
cudaStream_t stream_of(const Tensor& t) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}
#endif

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) fail("CUDA must run the kernel, got ", cudaGetErrorString(error));
}

// Host copies of what a target view points to, made behind the work of `stream` that writes it. Waits for the device:
// only under SPARSE_CE_VALIDATE=1.
class HostTarget {
 public:
  HostTarget(const TargetView& device, cudaStream_t stream) : view_(device), stream_(stream) {
    const int64_t offsets = device.offsets_step == 2 ? 2 * device.rows : device.rows + 1;
    view_.indices = copy(device.indices, device.entries, size_of(device.indices_dtype));
    view_.values = copy(device.values, device.entries, size_of(device.values_dtype));
    view_.offsets = copy(device.offsets, offsets, size_of(device.offsets_dtype));
    view_.row_mask = static_cast<const bool*>(copy(device.row_mask, device.rows, sizeof(bool)));
    check_cuda(cudaStreamSynchronize(stream_));
  }
  const TargetView& view() const { return view_; }

 private:
  const void* copy(const void* device, int64_t count, int64_t size) {
    if (!device) return nullptr;
    const auto bytes = static_cast<size_t>(count * size);
    copies_.emplace_back(bytes + 1);
    check_cuda(cudaMemcpyAsync(copies_.back().data(), device, bytes, cudaMemcpyDeviceToHost, stream_));
    return copies_.back().data();
  }

  TargetView view_;
  cudaStream_t stream_;
  std::vector<std::vector<char>> copies_;
};

struct Cuda {
  static void forward(const ForwardArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    const Tensor workspace = bytes(like, cuda::cross_entropy_forward_workspace(args));
    check_cuda(cuda::cross_entropy_forward(args, workspace.mutable_data_ptr(), stream_of(like)));
  }
  // Two kernels; where the logits fit into the second cache, the second finds them there.
  static void forward_with_gradient(const ForwardArgs& forward_args, const BackwardArgs& backward_args,
                                    const Tensor& like) {
    forward(forward_args, like);
    backward(backward_args, like);
  }
  static void backward(const BackwardArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    const Tensor workspace = bytes(like, cuda::cross_entropy_backward_workspace(args));
    check_cuda(cuda::cross_entropy_backward(args, workspace.mutable_data_ptr(), stream_of(like)));
  }
  static void backward_values(const BackwardArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::cross_entropy_backward_values(args, stream_of(like)));
  }
  static void loss_mean(const LossMeanArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::loss_mean(args, stream_of(like)));
  }
  static void check_target(const TargetView& target, const Tensor& like) {
    static const bool validate = [] {
      const char* given = std::getenv("SPARSE_CE_VALIDATE");
      return given && given[0] == '1';
    }();
    if (!validate) return;
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = stream_of(like);
    cudaStreamCaptureStatus status;
    check_cuda(cudaStreamIsCapturing(stream, &status));
    if (status != cudaStreamCaptureStatusNone) return;  // a graph's target has no values yet
    check_entries(HostTarget(target, stream).view());
  }
  static void sparse_softmax(const SparseSoftmaxArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::sparse_softmax(args, stream_of(like)));
  }
  static void sparse_softmax_backward(const SparseSoftmaxArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::sparse_softmax_backward(args, stream_of(like)));
  }
  static void check_rows(const SparseSoftmaxArgs&) {}  // the kernels stay within the entries
  static void masked_mean(const MaskedMeanArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    const Tensor workspace = bytes(like, cuda::masked_mean_workspace(args));
    check_cuda(cuda::masked_mean(args, workspace.mutable_data_ptr(), stream_of(like)));
  }
  static void masked_mean_backward(const MaskedMeanArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::masked_mean_backward(args, stream_of(like)));
  }

  static void accumulate(const AccumulateArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::accumulate(args, stream_of(like)));
  }
  static void clear_ignored_rows(const ClearRowsArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::clear_ignored_rows(args, stream_of(like)));
  }
  static void scale(const ScaleArgs& args, const Tensor& like) {
    const DeviceGuard guard(like.get_device_index());
    check_cuda(cuda::scale(args, stream_of(like)));
  }

  // Whether there are ignored rows only the device knows, and to ask it is to wait for it: they are multiplied as zeros.
  static constexpr bool kLeavesOut = false;
  static std::optional<LiveRows> live_rows(const TargetView&) { return std::nullopt; }
  static bool may_ignore(const TargetView& target) { return target.row_mask || (!target.offsets && target.width > 0); }

  // Tensor cores multiply 16 bits and add in float32, which a product keeps until it is summed.
  static ScalarType work_dtype(ScalarType input) { return input; }
  static ScalarType product_dtype(ScalarType work) {
    return kWideningProducts && size_in_bytes(work) == 2 ? ScalarType::Float : work;
  }

  // A sixteenth of the logits, but as much as is kept of the weight's gradient beside its own memory, a byte a weight:
  // each chunk reads and writes that gradient once, which below 2048 rows takes a tenth of the time of its products.
  static constexpr int64_t kWholeBytes = int64_t(256) << 20;
  static int64_t chunk_bytes(int64_t logits, int64_t logit_bytes, int64_t weights) {
    return std::max({logits / 16 * logit_bytes, weights, int64_t(64) << 20});
  }
  static constexpr int64_t kBlockBytes = int64_t(32) << 20;  // stays in the L2 cache; work for every multiprocessor

  // PyTorch's products run on its current stream, as the kernels do.
  static void add_product(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(kAddmmOut(out.get(), out.get(), a.get(), b.get(), 1, 1));
  }

  static Tensor empty_output(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    return empty(like, sizes, dtype);
  }

 private:
  // From torch's caching allocator: freed at return, reused by later work of the same stream only.
  static Tensor bytes(const Tensor& like, size_t size) {
    return empty(like, {static_cast<int64_t>(size)}, ScalarType::Byte);
  }
};

using CudaMaskedMeanOps = MaskedMeanOps<Cuda>;

#ifndef SPARSE_CE_CUDA_ARCHITECTURES
#define SPARSE_CE_CUDA_ARCHITECTURES "unknown"
#endif
std::string cuda_architectures() { return SPARSE_CE_CUDA_ARCHITECTURES; }

}  // namespace
}  // namespace sparse_ce

// In emulation (tests/emulation) the same bindings serve tensors of the CPU.
#ifdef SPARSE_CE_EMULATED
namespace {
std::string cpu_instruction_set() { return "emulated CUDA"; }
}  // namespace
STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CPU, m) {
  sparse_ce::CrossEntropyOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::LinearOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::SparseSoftmaxOps<sparse_ce::Cuda>::add_to(m);
  SCE_REGISTER_MASKED_MEAN_OPS(m, sparse_ce::CudaMaskedMeanOps);
}
STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
}
#else
STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CUDA, m) {
  sparse_ce::CrossEntropyOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::LinearOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::SparseSoftmaxOps<sparse_ce::Cuda>::add_to(m);
  SCE_REGISTER_MASKED_MEAN_OPS(m, sparse_ce::CudaMaskedMeanOps);
}
STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CompositeExplicitAutograd, m) {
  m.impl("cuda_architectures", TORCH_BOX(&sparse_ce::cuda_architectures));
}
#endif
