#include "../cuda/head_plan.h"
#include "../cuda/launchers.h"
#include "../cuda/row_plan.h"
#include "all_ops.h"
#include "cuda_checks.h"

#include <atomic>
#include <cstdlib>
#include <string_view>
#include <type_traits>

namespace sparse_ce {
namespace {

using cuda::check_cuda;

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

// SPARSE_CE_ONE_PASS=0 disables the one-pass kernels, so that tests and benchmarks can compare both.
Reads one_pass_reads() {
  static const Reads reads = [] {
    const char* value = std::getenv("SPARSE_CE_ONE_PASS");
    const std::string_view choice = value ? value : "";
    return choice == "0" ? Reads::kApart : Reads::kPlanned;
  }();
  return reads;
}

std::atomic<bool> plans_by_classes = false;

// Adds what the whole process has chosen to the arguments of a kernel.
template <typename args_t>
args_t prepared(args_t args) {
  if constexpr (std::is_same_v<ForwardArgs, args_t>) args.reads = one_pass_reads();
  if constexpr (std::is_base_of_v<CrossEntropyArgs, args_t>)
    if (plans_by_classes) args.planned_rows = int64_t(1) << 30;
  return args;
}

// Kernels run on torch's current stream, on which its GEMMs run too.
template <typename args_t>
void run(cudaError_t (*launcher)(const args_t&, cudaStream_t), const args_t& args, const Tensor& like) {
  const cuda::DeviceGuard guard(like.get_device_index());
  check_cuda(launcher(args, cuda::stream_of(like)));
}
template <typename args_t>
void run(cudaError_t (*launcher)(const args_t&, void*, cudaStream_t), const args_t& args, const Tensor& like) {
  const cuda::DeviceGuard guard(like.get_device_index());
  const Workspace bytes(cuda::workspace_of(args), like);
  check_cuda(launcher(args, bytes.data(), cuda::stream_of(like)));
}

class Cuda final : public Device {
 public:
  using Plan = cuda::HeadPlan;

#define SCE_DEFINE(name, args_t) \
  void name(const args_t& args, const Tensor& like) const override { run<args_t>(cuda::name, prepared(args), like); }
  SCE_KERNELS(SCE_DEFINE, SCE_DEFINE)
#undef SCE_DEFINE

  // Reads the logits once if a row fits into registers or shared memory. Otherwise it runs two kernels; the second one
  // reads the logits from the L2 cache if they fit.
  void cross_entropy_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward,
                                           const Tensor& like) const override {
    const cuda::DeviceGuard guard(like.get_device_index());
    const ForwardArgs args = prepared(forward);
    if (const cuda::OnePass form = cuda::one_pass_of(args))
      return check_cuda(cuda::cross_entropy_one_pass(form, args, &backward, cuda::stream_of(like)));
    cross_entropy_forward(args, like);
    cross_entropy_backward(backward, like);
  }

  void check_target(const TargetView& target, const Tensor& like) const override { cuda::check_target(target, like); }
  bool check_rows(const SparseSoftmaxArgs& args, const Tensor& like) const override {
    return cuda::check_rows(args, like);
  }
  void check_may_wait(const Tensor& like) const override {
    check(!cuda::is_capturing(like),
          "sparse_grad=True does not support CUDA graph capture: the host must wait for the number of distinct ids. "
          "Use sparse_grad=False.");
  }

  // Tensor cores multiply 16-bit numbers and accumulate in float32. A product stays in float32 until it is accumulated.
  ScalarType work_dtype(ScalarType input, bool) const override { return input; }
  ScalarType product_dtype(ScalarType work) const override {
    return size_in_bytes(work) == 2 ? ScalarType::Float : work;
  }
  ScalarType logits_dtype(ScalarType input) const override { return input; }
  void multiply(const Tensor& out, const Tensor& a, const Tensor& b) const override {
    out.scalar_type() == a.scalar_type() ? cuda::multiply(out, a, b) : cuda::multiply_widening(out, a, b);
  }
  void add_product(const Tensor& out, const Tensor& to, const Tensor& a, const Tensor& b) const override {
    STABLE_TORCH_ERROR_CODE_CHECK(cuda::add_product(out.get(), to.get(), a.get(), b.get(), 1, 1));
  }
  void copy_matrix(const Tensor& to, const Tensor& from) const override {
    const cuda::DeviceGuard guard(to.get_device_index());
    check_cuda(cuda::copy_matrix(to, from));
  }

  // The memory in use has no influence, because it changes between forward and backward.
  int64_t ample_bytes(const Tensor& like) const override { return Plan::ample_bytes_of(cuda::memory_of(like)); }
  void forgo_ample_chunks(const Tensor& like) const override { cuda::memory_of(like) = 1; }
};

#ifndef SPARSE_CE_CUDA_ARCHITECTURES
#define SPARSE_CE_CUDA_ARCHITECTURES "unknown"
#endif
std::string cuda_architectures() { return SPARSE_CE_CUDA_ARCHITECTURES; }

void plan_by_classes(bool enabled) { plans_by_classes = enabled; }

}  // namespace
}  // namespace sparse_ce

SCE_LIBRARY_IMPL(SCE_DISPATCH_KEY, m) { sparse_ce::add_ops<sparse_ce::Cuda>(m); }

SCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cuda_architectures", TORCH_BOX(&sparse_ce::cuda_architectures));
  m.impl("plan_by_classes", TORCH_BOX(&sparse_ce::plan_by_classes));
}
