#include "../ops.h"
#include "../sparse_softmax_ops.h"
#include "gradient_memory.h"

#include <torch/csrc/stable/library.h>

namespace sparse_ce {
namespace {

struct Cpu {
  static void forward(const ForwardArgs& args, const Tensor&) { cpu::cross_entropy_forward(args); }
  static void forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward, const Tensor&) {
    cpu::cross_entropy_forward_with_gradient(forward, backward);
  }
  static void backward(const BackwardArgs& args, const Tensor&) { cpu::cross_entropy_backward(args); }
  static void backward_values(const BackwardArgs& args, const Tensor&) { cpu::cross_entropy_backward_values(args); }
  static void mean(const MeanArgs& args, const Tensor&) { cpu::mean(args); }
  static void check_target(const TargetView& target) { check_entries(target); }
  static void sparse_softmax(const SparseSoftmaxArgs& args, const Tensor&) { cpu::sparse_softmax(args); }
  static void sparse_softmax_backward(const SparseSoftmaxArgs& args, const Tensor&) {
    cpu::sparse_softmax_backward(args);
  }
  static void check_rows(const SparseSoftmaxArgs& args) { check_rows_on_host(args); }

  static Tensor empty_output(const Tensor& like, std::initializer_list<int64_t> sizes) {
    size_t bytes = like.element_size();
    for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
    void* block = bytes < cpu::kLeastCachedBytes ? nullptr : cpu::take_gradient_memory(bytes);
    if (!block) return empty(like, sizes, like.scalar_type());
    const std::array<int64_t, 2> strides{sizes.begin()[sizes.size() - 1], 1};
    return torch::stable::from_blob(block, {sizes.begin(), sizes.size()}, {strides.end() - sizes.size(), sizes.size()},
                                    like.device(), like.scalar_type(), &cpu::give_gradient_memory);
  }
};

using CpuOps = Ops<Cpu>;
using CpuSparseSoftmaxOps = SparseSoftmaxOps<Cpu>;

std::string cpu_instruction_set() { return cpu::instruction_set(); }

}  // namespace
}  // namespace sparse_ce

STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CPU, m) {
  SCE_REGISTER_OPS(m, sparse_ce::CpuOps);
  SCE_REGISTER_SPARSE_SOFTMAX_OPS(m, sparse_ce::CpuSparseSoftmaxOps);
}

STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&sparse_ce::cpu_instruction_set));
}
