// cross_entropy.h - Defines the arguments of the loss kernels: pointers and sizes, independent of torch.
#pragma once

#include "../core/math.h"
#include "../core/target.h"

namespace sparse_ce {

// Accesses a row whose classes are strided.
template <typename scalar_t>
struct StridedRow {
  scalar_t* first;
  int64_t step;
  SCE_HD scalar_t& operator[](int64_t column) const { return first[column * step]; }
};

// Describes rows that are adjacent in memory, as in images (outer, vocab, inner). Row r is pixel r % inner of image r /
// inner.
struct StridedRows {
  int64_t inner;  // 0 means packed rows with a row stride
  int64_t outer_stride, column_stride;
  int64_t inner_stride = 1;

  template <typename scalar_t>
  SCE_HD StridedRow<scalar_t> row(scalar_t* first, int64_t r) const {
    const int64_t image = r < inner ? 0 : r / inner;  // avoids a 64-bit division if there is one image
    return {first + image * outer_stride + (r - image * inner) * inner_stride, column_stride};
  }
};

// Selects whether CUDA may read a row once for loss and gradient. kPlanned lets the plan decide; kApart runs separate
// kernels, for benchmarks and tests.
enum class Reads : uint8_t { kPlanned, kApart };

struct CrossEntropyArgs {
  const void* logits;       // (rows, vocab - first_class), unit column stride, any row stride; or as `strided`
  DType dtype;
  int64_t rows, vocab;      // columns >= target.num_classes exist in memory only
  int64_t first_class;      // nonzero if another call or process handles the classes before it
  int64_t row_stride;
  StridedRows strided;
  TargetView target;
  LossOptions options;
  const void* row_scale;    // (rows,) multiplies logit_scale, any stride; null means 1
  int64_t row_scale_stride;
  const void* weight_sum;   // (1,) sum of the class weights; null means num_classes
  int64_t max_blocks;       // 0 means no limit; tests lower it, so that blocks process several rows
  Reads reads;
  int64_t planned_rows;     // the rows for which kernels are planned, or 0 for `rows`
  int64_t rows_to_plan() const { return planned_rows > 0 ? planned_rows : rows; }

  // Returns a pointer that is indexed by class. Memory before first_class need not exist.
  template <typename scalar_t>
  SCE_HD const scalar_t* row(int64_t r) const {
    return static_cast<const scalar_t*>(logits) + (r * row_stride - first_class);
  }
  template <typename scalar_t>
  SCE_HD StridedRow<const scalar_t> strided_row(int64_t r) const {
    return strided.row(static_cast<const scalar_t*>(logits), r);
  }
  // Returns any row, packed or strided.
  template <typename scalar_t>
  SCE_HD StridedRow<const scalar_t> any_row(int64_t r) const {
    return strided.inner > 0 ? strided_row<scalar_t>(r) : StridedRow<const scalar_t>{row<scalar_t>(r), 1};
  }

  // Logits exist for the classes [first_class, classes_end()). Entries of other classes still count in the row's mass.
  SCE_HD int64_t classes_end() const {
    const int64_t end = vocab < target.num_classes ? vocab : target.num_classes;
    return end < first_class ? first_class : end;  // the shard has only padding
  }
  SCE_HD int64_t classes() const { return classes_end() - first_class; }
  SCE_HD bool holds(int64_t column) const { return first_class <= column && column < vocab; }

  // Returns true if z equals the logits in all rows and labels are not smoothed. The answer does not depend on the row,
  // so that all kernels agree.
  SCE_HD bool plain() const {
    return options.logit_scale == 1 && options.softcap == 0 && options.label_smoothing == 0 && !row_scale;
  }
  template <typename acc_t>
  SCE_HD LogitTransform<acc_t> transform(int64_t r) const {
    const acc_t of_row = row_scale ? static_cast<const acc_t*>(row_scale)[r * row_scale_stride] : acc_t(1);
    return LogitTransform<acc_t>(options, of_row);
  }
};

struct ForwardArgs : CrossEntropyArgs {
  void* loss;               // (rows,) arithmetic dtype
  void* lse;                // (rows,)
  void* lse_residual;       // (rows,), or null

  // Writes the outputs of a row, or 0 if it is ignored.
  template <typename acc_t>
  SCE_HD void write(int64_t r, bool ignored, const RowStats<acc_t>& stats, const TargetStats<acc_t>& entries) const {
    const RowLoss<acc_t> out(stats, entries, options, target.num_classes);
    static_cast<acc_t*>(loss)[r] = ignored ? acc_t(0) : out.loss;
    static_cast<acc_t*>(lse)[r] = ignored ? acc_t(0) : out.lse;
    if (lse_residual) static_cast<acc_t*>(lse_residual)[r] = ignored ? acc_t(0) : out.lse_residual;
  }
};

// Holds the arguments of backward. `grad_loss` and `grad_lse` may have any stride: an expanded scalar has stride 0.
struct BackwardArgs : CrossEntropyArgs {
  const void* grad_loss;    // (rows,), or null
  const void* grad_lse;     // (rows,), or null
  const void* lse;          // (rows,)
  const void* lse_residual; // (rows,), or null
  int64_t grad_loss_stride, grad_lse_stride;
  const void* row_weight;   // (rows,) multiplies grad_loss; null means 1
  int64_t row_weight_stride;
  void* grad_logits;        // shape and dtype of logits; may be the logits themselves
  int64_t grad_row_stride;
  StridedRows grad_strided; // set if logits are strided
  void* grad_values;        // shape of target.values, arithmetic dtype; zero on entry (values' gradient only)
  const void* expected;     // (1,) grad_output for which grad_logits were computed, or null
  const void* grad_mean;    // (1,) the actual grad_output

  template <typename scalar_t>
  SCE_HD scalar_t* gradient_row(int64_t r) const {
    return static_cast<scalar_t*>(grad_logits) + (r * grad_row_stride - first_class);
  }
  template <typename scalar_t>
  SCE_HD StridedRow<scalar_t> strided_gradient_row(int64_t r) const {
    return grad_strided.row(static_cast<scalar_t*>(grad_logits), r);
  }

  template <typename acc_t>
  SCE_HD acc_t grad_output(int64_t r) const {
    if (!grad_loss) return acc_t(0);
    const acc_t by = row_weight ? static_cast<const acc_t*>(row_weight)[r * row_weight_stride] : acc_t(1);
    return by * static_cast<const acc_t*>(grad_loss)[r * grad_loss_stride];
  }
  template <typename acc_t>
  SCE_HD acc_t grad_output_of_lse(int64_t r) const {
    return grad_lse ? static_cast<const acc_t*>(grad_lse)[r * grad_lse_stride] : acc_t(0);
  }

  // Returns true if grad_logits are up to date. Only the device may check this without synchronizing.
  SCE_HD bool is_up_to_date() const {
    if (!expected) return false;
    return dtype == DType::kFloat64 ? same_bits<double, uint64_t>() : same_bits<float, uint32_t>();
  }

  // Returns true if a row's gradient is 0. Such a row is not read, because it may contain NaN.
  template <typename acc_t>
  SCE_HD bool without_gradient(int64_t r) const {
    return target.ignored(r) || (grad_output<acc_t>(r) == acc_t(0) && grad_output_of_lse<acc_t>(r) == acc_t(0));
  }

  // `mass` is that of the row's entries. The gradient for the values does not use it.
  template <typename acc_t>
  SCE_HD GradientCoefficients<acc_t> coefficients(int64_t r, acc_t mass) const {
    const acc_t residual = lse_residual ? static_cast<const acc_t*>(lse_residual)[r] : acc_t(0);
    return coefficients(r, mass, static_cast<const acc_t*>(lse)[r], residual);
  }
  template <typename acc_t>
  SCE_HD GradientCoefficients<acc_t> coefficients(int64_t r, acc_t mass, acc_t lse_of_row, acc_t residual) const {
    const int64_t classes = target.num_classes;
    const acc_t weights = weight_sum ? *static_cast<const acc_t*>(weight_sum) : static_cast<acc_t>(classes);
    return {grad_output<acc_t>(r), grad_output_of_lse<acc_t>(r), mass, lse_of_row, residual, weights, options, classes};
  }

  // Writes the gradient for the value of entry i. `c` are the coefficients of its row.
  template <typename row_t, typename acc_t>
  SCE_HD void write_value(int64_t i, const row_t& row, const LogitTransform<acc_t>& transform,
                          const GradientCoefficients<acc_t>& c) const {
    const auto entry = target.entry<acc_t>(i);
    if (!holds(entry.column)) return;
    const acc_t by = target.class_weight<acc_t>(entry.column) * target.value_slope(entry);
    static_cast<acc_t*>(grad_values)[i] = c.of_value(transform(to_acc(row[entry.column])), by);
  }

 private:
  // Compares bits: equal NaNs are equal, and 0 differs from -0, which gives zeros of another sign.
  template <typename acc_t, typename bits_t>
  SCE_HD bool same_bits() const {
    bits_t before, now;
    std::memcpy(&before, expected, sizeof(acc_t));
    std::memcpy(&now, grad_mean, sizeof(acc_t));
    return before == now;
  }
};

namespace cpu {
void cross_entropy_forward(const ForwardArgs& args);
// `backward` reads what `forward` writes.
void cross_entropy_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward);
void cross_entropy_backward(const BackwardArgs& args);
void cross_entropy_backward_values(const BackwardArgs& args);
const char* instruction_set();  // "avx512", "avx2" or "default"
}  // namespace cpu

}  // namespace sparse_ce
