// linear/operands.h - Provides the operands of the linear head's GEMMs: rows of its input, blocks of its weight, and
// memory for chunks of logits.
//
// GEMMs run in the `work` dtype: the dtype of the input, or float32 on CPUs without 16-bit multiplication (whose 16-bit
// GEMM takes three times as long as the float32 one). Weights of another dtype are converted one block of classes at a
// time.
#pragma once

#include "plan.h"
#include "rows.h"

namespace sparse_ce {

// Calls f(begin, end) for blocks of [begin, end).
template <typename function_t>
void for_each_block(int64_t begin, int64_t end, int64_t block, const function_t& f) {
  for (int64_t i = begin; i < end; i += block) f(i, std::min(end, i + block));
}

template <typename device_t>
class LinearOperands {
 public:
  using Plan = typename device_t::Plan;

  LinearOperands(const Tensor& input, const Tensor& weight, int64_t classes, const TargetView& target,
                 const LinearPlan<device_t>& plan, const ActiveRows* active)
      : work(plan.work), products(plan.products), active_rows(active),
        input(input.dim() == 2 && input.stride(1) == 1 ? input : packed(input)), rows(target.rows), classes(classes),
        width(input.size(1)), weight_(rows_of(weight, 0, classes)), target_(target) {}

  // Returns the number of rows of size `width` in a block, of the weight, a product or the input.
  int64_t block_rows() const { return LinearPlan<device_t>::block_rows(width); }
  // Returns how many classes' weights can be read at once.
  int64_t weight_block() const {
    return weight_.scalar_type() == work || !Plan::kConvertsBlocks ? classes : block_rows();
  }

  // Enlarges the memory for a chunk of logits, and that for the input rows of a GEMM. Called before their first use.
  void reserve(int64_t chunk, int64_t input_rows) {
    chunk_ = std::max(chunk_, chunk);
    input_rows_ = std::max(input_rows_, input_rows);
  }

  // Uses the memory of the caller for chunks of its dtype.
  void borrow(const Tensor& memory) {
    (memory.scalar_type() == work ? work_chunk_ : wide_chunk_) =
        torch::stable::view(memory, std::array{memory.numel()});
  }

  // Returns memory (rows, columns) for a chunk of logits, or of their gradient. There is one per dtype.
  Tensor chunk(ScalarType dtype, int64_t rows, int64_t columns) {
    OptionalTensor& memory = dtype == work ? work_chunk_ : wide_chunk_;
    if (!memory) memory = device_t().empty_output(input, {chunk_}, dtype);
    return torch::stable::view(rows_of(*memory, 0, rows * columns), std::array{rows, columns});
  }

  // Returns memory for a block of converted weights or of a product. The two are never needed at the same time.
  Tensor block(ScalarType dtype, int64_t rows) {
    OptionalTensor& memory = dtype == work ? work_block_ : wide_block_;
    if (!memory) memory = device_t().empty_output(input, {std::min(classes, block_rows()), width}, dtype);
    return rows_of(*memory, 0, rows);
  }

  // Returns the input rows for a GEMM. Ignored rows are set to 0 if they are not removed. The next call may overwrite
  // them.
  Tensor input_of(int64_t begin, int64_t end) {
    const OptionalTensor inputs = active_rows.in_place(input, begin, end);
    const bool clear = device_t().may_ignore(target_);
    if (inputs && !clear && inputs->scalar_type() == work) return *inputs;
    if (!copied_rows_) copied_rows_ = empty(input, {input_rows_, width}, work);
    Tensor x = rows_of(*copied_rows_, 0, end - begin);
    inputs ? void(torch::stable::copy_(x, *inputs)) : active_rows.gather(input, x, begin);
    if (!clear) return x;
    ClearRowsArgs args{};
    args.rows = x.mutable_data_ptr();
    args.row_bytes = width * size_in_bytes(work);
    args.target = target_.slice(begin, end);
    device_t().clear_ignored_rows(args, x);
    return x;
  }

  // Returns the weights of the classes [begin, end) in the work dtype. The next call may overwrite them.
  Tensor weight_of(int64_t begin, int64_t end) {
    if (!Plan::kConvertsBlocks && weight_.scalar_type() != work) weight_ = torch::stable::to(weight_, work);
    const Tensor weights = rows_of(weight_, begin, end);
    if (weights.scalar_type() == work) return weights;
    Tensor w = block(work, end - begin);
    torch::stable::copy_(w, weights);
    return w;
  }

  // Returns ones (1, rows): the bias is the weight of an input that is always 1.
  Tensor ones(int64_t rows, ScalarType dtype) const {
    Tensor t = empty(input, {1, rows}, dtype);
    torch::stable::fill_(t, 1.0);
    return t;
  }

  const ScalarType work;
  const LinearProducts<device_t> products;
  const LinearRows<device_t> active_rows;
  const Tensor input;
  const int64_t rows, classes, width;

 private:
  Tensor weight_;
  TargetView target_;
  int64_t chunk_ = 0, input_rows_ = 0;
  OptionalTensor work_chunk_, wide_chunk_, work_block_, wide_block_, copied_rows_;
};

}  // namespace sparse_ce
