#include "../cpu/memory/gradient_memory.h"
#include "binary_cross_entropy_ops.h"
#include "candidates_ops.h"
#include "dense_divergence_ops.h"
#include "linear/ops.h"
#include "linear/select_ops.h"
#include "masked_mean_ops.h"
#include "op_library.h"
#include "sparse_softmax_ops.h"
#include "topk_ops.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>

namespace sparse_ce {
namespace {

struct Cpu {
  static void forward(const ForwardArgs& args, const Tensor&) { cpu::cross_entropy_forward(args); }
  static void forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward, const Tensor&) {
    cpu::cross_entropy_forward_with_gradient(forward, backward);
  }
  static void backward(const BackwardArgs& args, const Tensor&) { cpu::cross_entropy_backward(args); }
  static void backward_values(const BackwardArgs& args, const Tensor&) { cpu::cross_entropy_backward_values(args); }
  static void loss_mean(const LossMeanArgs& args, const Tensor&) { cpu::loss_mean(args); }
  static void select_forward(const SelectArgs& args, const Tensor&) { cpu::select_forward(args); }
  static void select_forward_with_gradient(const SelectArgs& forward, const BackwardArgs& backward, const Tensor&) {
    cpu::select_forward_with_gradient(forward, backward);
  }
  static void select_merge(const SelectMergeArgs& args, const Tensor&) { cpu::select_merge(args); }
  static void select_backward(const SelectBackwardArgs& args, const Tensor&) { cpu::select_backward(args); }
  static void topk_ids(const TopkArgs& args, const Tensor&) { cpu::topk_ids(args); }
  static void check_target(const TargetView& target, const Tensor&) { check_entries(target); }
  static void sparse_softmax(const SparseSoftmaxArgs& args, const Tensor&) { cpu::sparse_softmax(args); }
  static void sparse_softmax_backward(const SparseSoftmaxArgs& args, const Tensor&) {
    cpu::sparse_softmax_backward(args);
  }
  static bool check_rows(const SparseSoftmaxArgs& args, const Tensor&) {
    check_rows_on_host(args);
    return true;
  }
  static void dense_divergence(const DenseDivergenceArgs& args, const Tensor&) { cpu::dense_divergence(args); }
  static void binary_cross_entropy(const BinaryArgs& args, const Tensor&) { cpu::binary_cross_entropy(args); }
  static void masked_mean(const MaskedMeanArgs& args, const Tensor&) { cpu::masked_mean(args); }
  static void masked_mean_backward(const MaskedMeanArgs& args, const Tensor&) { cpu::masked_mean_backward(args); }

  static void candidate_logits(const CandidateForwardArgs& args, const Tensor&) { cpu::candidate_logits(args); }
  static void candidate_logits_backward(const CandidateBackwardArgs& args, const Tensor&) {
    cpu::candidate_logits_backward(args);
  }
  static void candidate_weight_gradient(const CandidateWeightArgs& args, const Tensor&) {
    cpu::candidate_weight_gradient(args);
  }
  static void check_may_wait(const Tensor&) {}  // the CPU is synchronous

  static void accumulate(const AccumulateArgs& args, const Tensor&) { cpu::accumulate(args); }
  static void scale(const ScaleArgs& args, const Tensor&) { cpu::scale(args); }

  // Removes ignored rows before the GEMMs.
  static constexpr bool kLeavesOut = true;
  static std::optional<ActiveRows> active_rows(const TargetView& target) { return ActiveRows::of(target); }
  static void copy_rows(const CopyRowsArgs& args) { cpu::copy_rows(args); }

  static ScalarType work_dtype(ScalarType input, bool float32_logits) {
    const bool native = input == ScalarType::BFloat16 && cpu::multiplies_bfloat16() && !float32_logits;
    return size_in_bytes(input) > 2 || native ? input : ScalarType::Float;
  }
  // Returns the dtype of logits that are returned to the caller. It is the same on every CPU.
  static ScalarType logits_dtype(ScalarType input) { return size_in_bytes(input) > 2 ? input : ScalarType::Float; }
  static constexpr bool kWidens = false;

  // A chunk takes 1/40 of the logits, but at least the size that keeps GEMMs fast: 256 rows of a large vocabulary in
  // float32. Chunks of 16-bit logits are smaller, because part of the weight gradient is stored next to them. This does
  // not apply if one chunk holds all rows. If memory is borrowed, only two of the three GEMMs run per chunk, and 1/16
  // is enough. A few rows of a large vocabulary stay in one chunk, because each chunk reads the weight twice.
  static int64_t whole_bytes(bool borrows) { return (borrows ? int64_t(64) : int64_t(128)) << 20; }
  static int64_t chunk_bytes(const HeadSizes& head) {
    const int64_t logits = head.rows * head.classes, logit_bytes = head.input_bytes;
    int64_t least = logit_bytes > 2 ? whole_bytes(false) : int64_t(48) << 20;
    if (head.borrows) least = std::clamp(logits / 16 * logit_bytes, int64_t(16) << 20, least);
    return std::max(logits / 40 * logit_bytes, least);
  }
  static int64_t ample_bytes(const Tensor&) { return 0; }
  static void forgo_ample_chunks(const Tensor&) {}
  static constexpr int64_t kRowsTogether = 16;
  static constexpr int64_t kBlockBytes = int64_t(4) << 20;  // fits into a cache
  static constexpr bool kConvertsBlocks = true;

  // Limits the stored rows to the memory of the weight gradient, in blocks of as many classes as fit into a chunk.
  static int64_t stored_rows(int64_t, bool) { return 0; }
  static constexpr int64_t kStoredBlockBytes = 0;
  static void copy_matrix(Tensor to, const Tensor& from) { torch::stable::copy_(to, from); }

  static void multiply(const Tensor& out, const Tensor& a, const Tensor& b) { sparse_ce::multiply(out, a, b); }
  static void add_product(const Tensor& out, const Tensor& to, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), to.get(), a.get(), b.get(), 1, 1));
  }

  static Tensor empty_output(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
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

SCE_LIBRARY_IMPL(CPU, m) {
  sparse_ce::CrossEntropyOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::SelectOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::LinearOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::LinearSelectOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::SparseSoftmaxOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::MaskedMeanOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::TopkOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::CandidateOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::DenseDivergenceOps<sparse_ce::Cpu>::add_to(m);
  sparse_ce::BinaryCrossEntropyOps<sparse_ce::Cpu>::add_to(m);
}

SCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&sparse_ce::cpu_instruction_set));
}
