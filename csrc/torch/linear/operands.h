// linear/operands.h - Provides the operands of the linear head's GEMMs: its input, blocks of its weight, and memory for
// products.
//
// GEMMs run in the `work` dtype: the dtype of the input, or float32 on CPUs without 16-bit multiplication (whose 16-bit
// GEMM takes three times as long as the float32 one). Weights of another dtype are converted one block of classes at a
// time.
#pragma once

#include "plan.h"

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

  LinearOperands(const Tensor& input, const Tensor& weight, int64_t classes, const LinearPlan<device_t>& plan)
      : work(plan.work), products(plan.products),
        input(input.dim() == 2 && input.stride(1) == 1 ? input : packed(input)), rows(input.size(0)), classes(classes),
        width(input.size(1)), weight_(rows_of(weight, 0, classes)) {}

  // Returns the number of rows of size `width` in a block, of the weight, a product or the input.
  int64_t block_rows() const { return LinearPlan<device_t>::block_rows(width); }
  // Returns how many classes' weights can be read at once.
  int64_t weight_block() const {
    return weight_.scalar_type() == work || !Plan::kConvertsBlocks ? classes : block_rows();
  }

  // Returns memory for a block of converted weights or of a product. The two are never needed at the same time.
  Tensor block(ScalarType dtype, int64_t rows) {
    OptionalTensor& memory = dtype == work ? work_block_ : wide_block_;
    if (!memory) memory = device_t().empty_output(input, {std::min(classes, block_rows()), width}, dtype);
    return rows_of(*memory, 0, rows);
  }

  // Returns the input rows for a GEMM. The next call with more rows must follow the last use of these.
  Tensor input_of(int64_t begin, int64_t end) {
    const Tensor x = rows_of(input, begin, end);
    if (x.scalar_type() == work) return x;
    if (!copied_rows_ || copied_rows_->size(0) < end - begin) copied_rows_ = empty(input, {end - begin, width}, work);
    Tensor copied = rows_of(*copied_rows_, 0, end - begin);
    torch::stable::copy_(copied, x);
    return copied;
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
  const Tensor input;
  const int64_t rows, classes, width;

 private:
  Tensor weight_;
  OptionalTensor work_block_, wide_block_, copied_rows_;
};

}  // namespace sparse_ce
