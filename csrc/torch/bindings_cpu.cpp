#include "../cpu/head_plan.h"
#include "../cpu/memory/gradient_memory.h"
#include "all_ops.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>

namespace sparse_ce {
namespace {

class Cpu final : public Device {
 public:
  using Plan = cpu::HeadPlan;

#define SCE_DEFINE(name, args_t) \
  void name(const args_t& args, const Tensor&) const override { cpu::name(args); }
  SCE_KERNELS(SCE_DEFINE, SCE_DEFINE)
#undef SCE_DEFINE

  void cross_entropy_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward,
                                           const Tensor&) const override {
    cpu::cross_entropy_forward_with_gradient(forward, backward);
  }
  void check_target(const TargetView& target, const Tensor&) const override { check_entries(target); }
  bool check_rows(const SparseSoftmaxArgs& args, const Tensor&) const override {
    check_rows_on_host(args);
    return true;
  }

  ScalarType work_dtype(ScalarType input, bool float32_logits) const override {
    const bool native = input == ScalarType::BFloat16 && cpu::multiplies_bfloat16() && !float32_logits;
    return size_in_bytes(input) > 2 || native ? input : ScalarType::Float;
  }
  // It is the same on every CPU.
  ScalarType logits_dtype(ScalarType input) const override {
    return size_in_bytes(input) > 2 ? input : ScalarType::Float;
  }
  void multiply(const Tensor& out, const Tensor& a, const Tensor& b) const override { sparse_ce::multiply(out, a, b); }
  void add_product(const Tensor& out, const Tensor& to, const Tensor& a, const Tensor& b) const override {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), to.get(), a.get(), b.get(), 1, 1));
  }
  void copy_matrix(const Tensor& to, const Tensor& from) const override {
    Tensor target = to;
    torch::stable::copy_(target, from);
  }

  Tensor empty_output(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) const override {
    size_t bytes = static_cast<size_t>(size_in_bytes(dtype));
    bool overflows = false;  // torch raises the error
    for (const int64_t size : sizes) overflows |= __builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes);
    void* block = overflows || bytes < cpu::kLeastCachedBytes ? nullptr : cpu::acquire_gradient_memory(bytes);
    if (!block) return empty(like, sizes, dtype);
    const std::array<int64_t, 2> strides{sizes.begin()[sizes.size() - 1], 1};
    return torch::stable::from_blob(block, {sizes.begin(), sizes.size()}, {strides.end() - sizes.size(), sizes.size()},
                                    like.device(), dtype, &cpu::release_gradient_memory);
  }
};

std::string cpu_instruction_set() { return cpu::instruction_set(); }

}  // namespace
}  // namespace sparse_ce

SCE_LIBRARY_IMPL(CPU, m) { sparse_ce::add_ops<sparse_ce::Cpu>(m); }

SCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&sparse_ce::cpu_instruction_set));
}
