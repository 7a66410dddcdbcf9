#include "../cuda/head_plan.h"
#include "../cuda/launchers.h"
#include "../cuda/row_plan.h"
#include "binary_cross_entropy_ops.h"
#include "candidates_ops.h"
#include "cuda_device.h"
#include "dense_divergence_ops.h"
#include "linear/ops.h"
#include "linear/select_ops.h"
#include "masked_mean_ops.h"
#include "op_library.h"
#include "sparse_softmax_ops.h"
#include "topk_ops.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <string_view>
#include <vector>

namespace sparse_ce {
namespace {

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) fail("CUDA call failed: ", cudaGetErrorString(error));
}

// Copies device arrays to the host, after the preceding work on `stream`. Used only with SPARSE_CE_VALIDATE=1, because
// it synchronizes with the device.
class HostCopies {
 public:
  explicit HostCopies(cudaStream_t stream) : stream_(stream) {}

  const void* of(const void* device, int64_t count, int64_t size) {
    if (!device) return nullptr;
    const auto bytes = static_cast<size_t>(count * size);
    copies_.emplace_back(bytes + 1);
    if (bytes == 0) return copies_.back().data();
    check_cuda(cudaMemcpyAsync(copies_.back().data(), device, bytes, cudaMemcpyDeviceToHost, stream_));
    return copies_.back().data();
  }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_;
  std::vector<std::vector<char>> copies_;
};

// Holds host copies of the arrays of a target view.
class HostTarget {
 public:
  HostTarget(const TargetView& device, cudaStream_t stream) : view_(device), copies_(stream) {
    const int64_t offsets = device.offsets_step == 2 ? 2 * device.rows : device.rows + 1;
    view_.indices = copies_.of(device.indices, device.entries, size_of(device.indices_dtype));
    view_.values = copies_.of(device.values, device.entries, size_of(device.values_dtype));
    view_.offsets = copies_.of(device.offsets, offsets, size_of(device.offsets_dtype));
    view_.row_mask = static_cast<const bool*>(copies_.of(device.row_mask, device.rows, sizeof(bool)));
    copies_.wait();
  }
  const TargetView& view() const { return view_; }

 private:
  TargetView view_;
  HostCopies copies_;
};

struct Cuda : cuda::HeadPlan {
  static void forward(const ForwardArgs& args, const Tensor& like) {
    run(cuda::cross_entropy_forward, cuda::cross_entropy_forward_workspace, with_choice(args), like);
  }
  // Reads the logits once if a row fits into registers or shared memory. Otherwise it runs two kernels; the second one
  // reads the logits from the L2 cache if they fit.
  static void forward_with_gradient(const ForwardArgs& forward_args, const BackwardArgs& backward_args,
                                    const Tensor& like) {
    const cuda::DeviceGuard guard(like.get_device_index());
    const ForwardArgs args = with_choice(forward_args);
    const cuda::OnePass form = cuda::one_pass_of(args);
    if (!form) {
      forward(args, like);
      return backward(backward_args, like);
    }
    check_cuda(cuda::cross_entropy_one_pass(form, args, &backward_args, cuda::stream_of(like)));
  }
  static void backward(const BackwardArgs& args, const Tensor& like) {
    run(cuda::cross_entropy_backward, cuda::cross_entropy_backward_workspace, args, like);
  }
  static void backward_values(const BackwardArgs& args, const Tensor& like) {
    run(cuda::cross_entropy_backward_values, args, like);
  }
  static void loss_mean(const LossMeanArgs& args, const Tensor& like) {
    run(cuda::loss_mean, cuda::loss_mean_workspace, args, like);
  }
  static void select_forward(const SelectArgs& args, const Tensor& like) {
    run(cuda::select_forward, cuda::select_forward_workspace, args, like);
  }
  static void select_forward_with_gradient(const SelectArgs& forward, const BackwardArgs& backward_args,
                                           const Tensor& like) {
    select_forward(forward, like);
    backward(backward_args, like);
  }
  static void select_merge(const SelectMergeArgs& args, const Tensor& like) { run(cuda::select_merge, args, like); }
  static void select_backward(const SelectBackwardArgs& args, const Tensor& like) {
    run(cuda::select_backward, cuda::cross_entropy_backward_workspace, args, like);
  }
  static void topk_ids(const TopkArgs& args, const Tensor& like) {
    run(cuda::topk_ids, cuda::topk_ids_workspace, args, like);
  }
  static void check_target(const TargetView& target, const Tensor& like) {
    if (!validates()) return;
    if (is_capturing(like)) return;  // during capture the target has no values yet
    const cuda::DeviceGuard guard(like.get_device_index());
    check_entries(HostTarget(target, cuda::stream_of(like)).view());
  }
  static void sparse_softmax(const SparseSoftmaxArgs& args, const Tensor& like) {
    run(cuda::sparse_softmax, cuda::sparse_softmax_workspace, args, like);
  }
  static void sparse_softmax_backward(const SparseSoftmaxArgs& args, const Tensor& like) {
    run(cuda::sparse_softmax_backward, cuda::sparse_softmax_workspace, args, like);
  }
  // The kernels never access memory outside the entries, even if the rows are invalid.
  static bool check_rows(const SparseSoftmaxArgs& args, const Tensor& like) {
    if (!validates() || is_capturing(like)) return false;
    const cuda::DeviceGuard guard(like.get_device_index());
    HostCopies copies(cuda::stream_of(like));
    SparseSoftmaxArgs on_host = args;
    on_host.offsets = copies.of(args.offsets, args.rows + 1, size_of(args.offsets_dtype));
    on_host.order = static_cast<const int64_t*>(copies.of(args.order, args.entries, sizeof(int64_t)));
    copies.wait();
    check_rows_on_host(on_host);
    return true;
  }
  static void masked_mean(const MaskedMeanArgs& args, const Tensor& like) {
    run(cuda::masked_mean, cuda::masked_mean_workspace, args, like);
  }
  static void masked_mean_backward(const MaskedMeanArgs& args, const Tensor& like) {
    run(cuda::masked_mean_backward, args, like);
  }

  static void binary_cross_entropy(const BinaryArgs& args, const Tensor& like) {
    run(cuda::binary_cross_entropy, args, like);
  }

  static void dense_divergence(const DenseDivergenceArgs& args, const Tensor& like) {
    run(cuda::dense_divergence, args, like);
  }

  static void candidate_logits(const CandidateForwardArgs& args, const Tensor& like) {
    run(cuda::candidate_logits, args, like);
  }
  static void candidate_logits_backward(const CandidateBackwardArgs& args, const Tensor& like) {
    run(cuda::candidate_logits_backward, args, like);
  }
  static void candidate_weight_gradient(const CandidateWeightArgs& args, const Tensor& like) {
    run(cuda::candidate_weight_gradient, args, like);
  }
  static void check_may_wait(const Tensor& like) {
    check(!is_capturing(like),
          "sparse_grad=True does not support CUDA graph capture: the host must wait for the number of distinct ids. "
          "Use sparse_grad=False.");
  }

  static void accumulate(const AccumulateArgs& args, const Tensor& like) { run(cuda::accumulate, args, like); }
  static void clear_ignored_rows(const ClearRowsArgs& args, const Tensor& like) {
    run(cuda::clear_ignored_rows, args, like);
  }
  static void scale(const ScaleArgs& args, const Tensor& like) { run(cuda::scale, args, like); }

  // Only the device knows whether rows are ignored, and reading that would synchronize. Ignored rows are zeroed
  // instead.
  static constexpr bool kLeavesOut = false;
  static std::optional<ActiveRows> active_rows(const TargetView&) { return std::nullopt; }
  static bool may_ignore(const TargetView& target) { return target.row_mask || (!target.offsets && target.width > 0); }

  // Tensor cores multiply 16-bit numbers and accumulate in float32. A product stays in float32 until it is accumulated.
  static ScalarType work_dtype(ScalarType input, bool) { return input; }
  static ScalarType logits_dtype(ScalarType input) { return input; }
  static constexpr bool kWidens = true;

  // See cuda/head_plan.h. The memory in use has no influence, because it changes between forward and backward.
  static int64_t ample_bytes(const Tensor& like) { return ample_bytes_of(cuda::memory_of(like)); }
  static void forgo_ample_chunks(const Tensor& like) { cuda::memory_of(like) = 1; }
  static constexpr bool kConvertsBlocks = false;
  static void copy_matrix(const Tensor& to, const Tensor& from) {
    const cuda::DeviceGuard guard(to.get_device_index());
    check_cuda(cuda::copy_matrix(to, from));
  }

  // PyTorch's GEMMs and the kernels run on the same stream, the current one.
  static void multiply(const Tensor& out, const Tensor& a, const Tensor& b) { cuda::multiply(out, a, b); }
  static void multiply_widening(const Tensor& out, const Tensor& a, const Tensor& b) {
    cuda::multiply_widening(out, a, b);
  }
  // `to` is `out` or a vector that cuBLAS broadcasts over the rows and adds to the product.
  static void add_product(const Tensor& out, const Tensor& to, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(cuda::add_product(out.get(), to.get(), a.get(), b.get(), 1, 1));
  }

  static Tensor empty_output(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    return empty(like, sizes, dtype);
  }

 private:
  static bool validates() {
    static const bool validates = [] {
      const char* value = std::getenv("SPARSE_CE_VALIDATE");
      return value && value[0] == '1';
    }();
    return validates;
  }
  // SPARSE_CE_ONE_PASS=0 disables the one-pass kernels, so that tests and benchmarks can compare both.
  static ForwardArgs with_choice(ForwardArgs args) {
    static const Reads reads = [] {
      const char* value = std::getenv("SPARSE_CE_ONE_PASS");
      const std::string_view choice = value ? value : "";
      return choice == "0" ? Reads::kApart : Reads::kPlanned;
    }();
    args.reads = reads;
    return args;
  }
  static bool is_capturing(const Tensor& like) {
    const cuda::DeviceGuard guard(like.get_device_index());
    cudaStreamCaptureStatus status;
    check_cuda(cudaStreamIsCapturing(cuda::stream_of(like), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  template <typename args_t>
  static void run(cudaError_t (*launcher)(const args_t&, cudaStream_t), const args_t& args, const Tensor& like) {
    const cuda::DeviceGuard guard(like.get_device_index());
    check_cuda(launcher(args, cuda::stream_of(like)));
  }
  // Allocates from torch's caching allocator. The memory is freed on return and reused only by later work on the same
  // stream. Nothing is allocated for 0 bytes, which saves 2 us on the host.
  class Workspace {
   public:
    Workspace(size_t bytes, const Tensor& like) {
      if (bytes > 0) bytes_ = empty(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
    }
    void* data() const { return bytes_ ? bytes_->mutable_data_ptr() : nullptr; }

   private:
    OptionalTensor bytes_;
  };
  template <typename args_t, typename sized_t>
  static void run(cudaError_t (*launcher)(const args_t&, void*, cudaStream_t), size_t (*workspace)(const sized_t&),
                  const args_t& args, const Tensor& like) {
    const cuda::DeviceGuard guard(like.get_device_index());
    const Workspace bytes(workspace(args), like);
    check_cuda(launcher(args, bytes.data(), cuda::stream_of(like)));
  }
};

#ifndef SPARSE_CE_CUDA_ARCHITECTURES
#define SPARSE_CE_CUDA_ARCHITECTURES "unknown"
#endif
std::string cuda_architectures() { return SPARSE_CE_CUDA_ARCHITECTURES; }

}  // namespace
}  // namespace sparse_ce

SCE_LIBRARY_IMPL(SCE_DISPATCH_KEY, m) {
  sparse_ce::CrossEntropyOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::SelectOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::LinearOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::LinearSelectOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::SparseSoftmaxOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::MaskedMeanOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::TopkOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::CandidateOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::DenseDivergenceOps<sparse_ce::Cuda>::add_to(m);
  sparse_ce::BinaryCrossEntropyOps<sparse_ce::Cuda>::add_to(m);
}

SCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cuda_architectures", TORCH_BOX(&sparse_ce::cuda_architectures));
}
