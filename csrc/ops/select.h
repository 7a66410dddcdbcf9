// select.h - Defines select: the log-probabilities of the entries' classes and further outputs of the same read of the
// logits. Contains the formulas of forward and backward, and the arguments of the devices.
//
// For each row, in the notation of math.h, S is the set of the entries' classes and q_j = exp(z_j - lse):
//
//   log_probs_k = z_{c_k} - lse             log_tail   = log sum_{j not in S} q_j, not 1 minus the other terms
//   entropy     = lse - sum_j q_j z_j       mean_logit = sum_j z_j / n       argmax: the lowest class of the maximum
//   collision   = log sum_j q_j^2           rank: the number of classes above the first entry's
//
// g_k, g_r, g_H, g_m and g_C are the grad_outputs of log_probs, log_tail, entropy, mean_logit and collision. With
// lse_tail = lse + log_tail, C = exp(collision) and the loss's coefficients a, b and d:
//
//   dl/dz_j = q_j (a - sum_k g_k - g_r - g_H (log q_j + entropy) + 2 g_C (q_j / C - 1)) - b o_j + g_m / n
//             + (j in S ? sum_{k: c_k = j} (g_k - d w~_k) : g_r exp(z_j - lse_tail))
//   dl/ds   = sum_j dl/dz_j dz_j/ds, s being the row's scale
//
// C is at least 1 / n, so 1 / C does not overflow. The loss alone is the case g_k = g_r = g_H = g_m = g_C = 0. It has
// separate kernels, which keep two numbers per row instead of up to nine and have hand-written AVX-512 loops.
#pragma once

#include "cross_entropy.h"
#include "select_stats.h"

#include <cstring>

namespace sparse_ce {

// Holds the gradient's coefficients of a row. The caller computes the entries' weights w = sum (d w~ - g).
template <typename acc_t>
struct SelectCoefficients : GradientCoefficients<acc_t> {
  acc_t of_entropy = 0, entropy = 0, of_tail = 0, log_tail = 0, of_each = 0;
  acc_t of_squares = 0, of_square = 0, collision = 0;  // 2 g_C, 2 g_C / C, and log C
  // The term of log_tail is `tail_per_q` q_j + `beside` exp(z_j - lse_tail). per_q is the factor of q_j in all terms
  // but those of the entropy and of q_j / C.
  acc_t tail_per_q = 0, beside = 0, per_q = 0;

  SCE_HD explicit SelectCoefficients(const GradientCoefficients<acc_t>& of_loss)
      : GradientCoefficients<acc_t>(of_loss) {}

  // Returns the coefficients of the classes inside or outside S. If the tail is large, exp(z_j - lse_tail) - q_j of a
  // class outside S is not computed as a difference.
  SCE_HD SelectCoefficients of_classes(bool inside) const {
    SelectCoefficients c = *this;
    const bool large = log_tail > acc_t(-1);
    c.tail_per_q = of_tail * (!inside && large ? exponential_less_1(-log_tail) : acc_t(-1));
    c.beside = inside || large ? acc_t(0) : of_tail;
    c.per_q = (this->a - of_squares) + c.tail_per_q;
    return c;
  }

  // Returns the sum of dl/dz over all classes, given the sums of the class weights o and of the entries' weights.
  SCE_HD acc_t total(acc_t class_weights, acc_t entry_weights, int64_t num_classes) const {
    return (this->a - entry_weights) + (of_each * static_cast<acc_t>(num_classes) - this->b * class_weights);
  }

  // Returns true if the gradient has more terms than that of the loss, a q_j - b o_j.
  SCE_HD bool more() const {
    return of_entropy != acc_t(0) || of_tail != acc_t(0) || of_each != acc_t(0) || of_square != acc_t(0);
  }

  // Returns dl/dz_j without the term of `beside`. For j in S the caller subtracts the entries' weights `w`. A logit of
  // -inf contributes 0 to the entropy.
  SCE_HD acc_t at(acc_t z, acc_t class_weight) const {
    const acc_t log_q = this->log_prob(z);
    const acc_t surprise = (log_q < acc_t(-1000) ? acc_t(-1000) : log_q) + entropy;
    const acc_t q = exponential(log_q);
    return q * (per_q - of_entropy * surprise + of_square * q) + (of_each - this->b * class_weight);
  }
  // Returns the term of `beside`. exp(z - lse_tail) overflows only inside S.
  SCE_HD acc_t at_tail(acc_t z) const { return beside * exponential(this->log_prob(z) - log_tail); }
  // Returns dl/dz_j of a class that holds most, see GradientCoefficients. `others` is the sum of the weights `w` of the
  // other classes. q_j / C - 1 is no difference either.
  SCE_HD acc_t at_most(acc_t z, acc_t class_weight, acc_t others) const {
    const acc_t log_q = this->log_prob(z), q_less_1 = exponential_less_1(log_q), q = acc_t(1) + q_less_1;
    const acc_t of_stats = tail_per_q - of_entropy * (log_q + entropy);
    const acc_t of_row = others + (this->other - this->b * class_weight) + of_each;
    return this->a * q_less_1 + of_row + q * (of_stats + of_squares * exponential_less_1(log_q - collision));
  }
};

// Holds the arguments of forward, for all classes or for a shard. A shard writes only `statistics` and `chosen`.
struct SelectArgs : ForwardArgs {
  RequestedOutputs outputs;
  void* log_probs;  // shape of the indices, arithmetic dtype; padding_value on entry with offsets
  void* log_tail;  // (rows,), or null
  void* entropy;  // (rows,), or null
  void* mean_logit;  // (rows,), or null
  int64_t* argmax;  // (rows,), or null
  void* collision;  // (rows,), or null
  int64_t* rank;  // (rows,), or null
  double padding_value;
  void* statistics;  // (rows, ShardStats::numbers), or null
  void* chosen;  // shape of the indices, or null: the logits of a shard's own entries; 0 on entry
  const void* ranked;  // (rows,): the logits of the ranked classes for a shard, whose own classes may not include them

  SCE_HD bool needs_smoothing() const { return options.label_smoothing != 0; }
  // Returns true if the entries' classes must be excluded from the tail's sums.
  SCE_HD bool needs_tail() const { return outputs.log_tail; }
  // Returns true if RowStats is sufficient, with a rank of logits that are not transformed.
  SCE_HD bool plain() const {
    return !needs_spread() && !outputs.mean_logit && !outputs.argmax && !outputs.log_tail &&
           (!outputs.rank || CrossEntropyArgs::plain());
  }
  // Returns true if `spread` or `squares` is needed; they are computed together.
  SCE_HD bool needs_spread() const { return outputs.entropy || outputs.collision; }

  // Returns the class of a row's first entry that is not padding, or -1 if it has none or it is out of range.
  template <typename acc_t>
  SCE_HD int64_t ranked_class(int64_t r) const {
    const EntryRange range = target.row(r);
    int64_t i = range.begin;
    while (i < range.end && target.column<acc_t>(i) == TargetView::kPadding) ++i;
    return i < range.end ? target.chosen<acc_t>(i).column : -1;
  }
  template <typename acc_t, typename scalar_t>
  SCE_HD Ranked<acc_t> ranked_logit(int64_t r, const scalar_t* row) const {
    const acc_t scale = transform<acc_t>(r).scale;
    const int64_t column = ranked_class<acc_t>(r);
    const acc_t logit = ranked ? static_cast<const acc_t*>(ranked)[r] : column < 0 ? acc_t(0) : to_acc(row[column]);
    return {logit, column >= 0, scale < acc_t(0), scale == acc_t(0)};
  }
  // Returns one that compares nothing if no rank is requested.
  template <typename acc_t, typename scalar_t>
  SCE_HD Ranked<acc_t> ranked_if_requested(int64_t r, const scalar_t* row) const {
    return outputs.rank ? ranked_logit<acc_t>(r, row) : Ranked<acc_t>{0, true, false, true};
  }

  // Writes the outputs per row: 0 if the row is ignored, NaN if one of its indices is out of range.
  template <typename acc_t>
  SCE_HD void write_row(int64_t r, bool ignored, bool invalid, const Scanned<acc_t>& scanned,
                        const TargetStats<acc_t>& entries) const {
    if (statistics) return write_statistics(r, ShardStats<acc_t>{scanned, entries});
    const SelectStats<acc_t>& stats = scanned.all;
    const auto put = [&](void* out, acc_t x) {
      if (out) static_cast<acc_t*>(out)[r] = ignored ? acc_t(0) : invalid ? Limits<acc_t>::kNaN : x;
    };
    const RowLoss<acc_t> of_row(stats.row, entries, options, target.num_classes);
    put(loss, of_row.loss);
    put(lse, of_row.lse);
    put(lse_residual, of_row.lse_residual);
    put(log_tail, scanned.log_tail());
    put(entropy, stats.entropy());
    put(mean_logit, stats.total / static_cast<acc_t>(target.num_classes));
    put(collision, not_above_0(stats.collision()));
    if (argmax) argmax[r] = ignored ? -1 : stats.argmax < 0 ? 0 : stats.argmax;
    if (rank) rank[r] = ignored || invalid || stats.above < 0 ? -1 : stats.above;
  }

  // Writes the output of entry i of an active row, whose logits are those that transform(logit) returns. An entry whose
  // weight underflows to 0 is not padding here.
  template <typename scalar_t, typename acc_t, typename transform_t>
  SCE_HD void write_entry(int64_t i, bool invalid, const scalar_t* row, const transform_t& transform,
                          const RowStats<acc_t>& stats) const {
    const int64_t column = target.chosen<acc_t>(i).column;
    if (!statistics)
      write_log_prob(i, invalid, column, [&] { return transform(to_acc(row[column])); }, stats);
    else if (column >= 0 && holds(column))
      static_cast<acc_t*>(chosen)[i] = transform(to_acc(row[column]));
  }
  // Sets the log-probabilities of an ignored row to 0. The logits of a shard are already 0.
  template <typename acc_t>
  SCE_HD void clear(EntryRange range) const {
    for (int64_t i = range.begin; !statistics && i < range.end; ++i) static_cast<acc_t*>(log_probs)[i] = acc_t(0);
  }
  // z() returns the logit of class `column`. It is called only if the entry has a class.
  template <typename acc_t, typename logit_t>
  SCE_HD void write_log_prob(int64_t i, bool invalid, int64_t column, const logit_t& z,
                             const RowStats<acc_t>& stats) const {
    acc_t log_prob = static_cast<acc_t>(padding_value);
    if (column >= 0) log_prob = not_above_0((z() - stats.max) - stats.log_total());
    static_cast<acc_t*>(log_probs)[i] = invalid ? Limits<acc_t>::kNaN : log_prob;
  }

  // Clamps to 0, because rounding may lift the logarithm of a number close to 1 above 0. NaN stays NaN.
  template <typename acc_t>
  SCE_HD static acc_t not_above_0(acc_t x) {
    return x > acc_t(0) ? acc_t(0) : x;
  }

 private:
  template <typename acc_t>
  SCE_HD void write_statistics(int64_t r, ShardStats<acc_t> stats) const {
    acc_t* to = static_cast<acc_t*>(statistics) + r * ShardStats<acc_t>::numbers(outputs, needs_smoothing());
    stats.for_each(outputs, needs_smoothing(), [&](acc_t& number) { std::memcpy(to++, &number, sizeof(number)); });
  }
};

// Holds the arguments that merge the statistics of all shards into outputs.
struct SelectMergeArgs : SelectArgs {
  const void* gathered;  // (shards, rows, ShardStats::numbers)
  const void* logits_of_entries;  // shape of the indices, or null; arbitrary for entries without a class
  int64_t shards;

  template <typename acc_t>
  SCE_HD ShardStats<acc_t> of_shard(int64_t shard, int64_t r) const {
    const int64_t numbers = ShardStats<acc_t>::numbers(outputs, needs_smoothing());
    const acc_t* from = static_cast<const acc_t*>(gathered) + (shard * rows + r) * numbers;
    ShardStats<acc_t> stats;
    stats.for_each(outputs, needs_smoothing(), [&](acc_t& number) { std::memcpy(&number, from++, sizeof(number)); });
    return stats;
  }
  template <typename acc_t>
  SCE_HD void write_merged_entry(int64_t i, bool invalid, const RowStats<acc_t>& stats) const {
    const auto z = [&] { return static_cast<const acc_t*>(logits_of_entries)[i]; };
    write_log_prob(i, invalid, target.chosen<acc_t>(i).column, z, stats);
  }
};

// Represents a grad_output (rows,) with any stride. Null means zeros.
struct RowGradOutput {
  const void* grad;
  int64_t stride;

  template <typename acc_t>
  SCE_HD acc_t at(int64_t r) const {
    return grad ? static_cast<const acc_t*>(grad)[r * stride] : acc_t(0);
  }
};

struct SelectBackwardArgs : BackwardArgs {
  const void* grad_log_probs;  // shape of the indices, or null
  RowGradOutput grad_log_tail, grad_entropy, grad_mean_logit, grad_collision;
  const void* log_tail;  // (rows,) output of forward, required if it has a gradient
  const void* entropy;  // (rows,)
  const void* collision;  // (rows,)
  void* grad_scale;  // (rows,), or null: dl/ds of each row

  template <typename acc_t>
  SCE_HD acc_t grad_output_of_entry(int64_t i) const {
    return grad_log_probs ? static_cast<const acc_t*>(grad_log_probs)[i] : acc_t(0);
  }
  // dl/ds = sum_j d_j x_j, where x are the stored logits and d = dl/d(s x), whose sum is known. The rounding errors of
  // d would be multiplied by the common part of all logits. Therefore x is taken relative to the value that all logits
  // would have if they were equal. Under a softcap no sum is known, and x is taken relative to 0.
  template <typename acc_t>
  SCE_HD acc_t common_logit(int64_t r) const {
    if (options.softcap != 0) return acc_t(0);
    const acc_t z = static_cast<const acc_t*>(lse)[r] - logarithm(static_cast<acc_t>(target.num_classes));
    const acc_t x = z / transform<acc_t>(r).scale;
    return x - x == acc_t(0) ? x : acc_t(0);
  }
  template <typename acc_t>
  SCE_HD static acc_t scale_term(acc_t d, acc_t x, acc_t common) {
    return d == acc_t(0) ? acc_t(0) : d * (x - common);  // under a softcap an infinite logit contributes nothing
  }
  // Returns the term that is added once per row for these coefficients. Only the first shard adds it.
  template <typename acc_t>
  SCE_HD acc_t scale_of_all(acc_t common, const SelectCoefficients<acc_t>& c, acc_t weights) const {
    if (common == acc_t(0) || first_class > 0 || vocab == 0) return acc_t(0);
    const int64_t classes = target.num_classes;
    const acc_t of_classes = weight_sum ? *static_cast<const acc_t*>(weight_sum) : static_cast<acc_t>(classes);
    return common * c.total(of_classes, weights, classes);
  }
  // Returns true if only the entries' log-probabilities can have a gradient in a row.
  template <typename acc_t>
  SCE_HD bool without_row_gradient(int64_t r) const {
    return without_gradient<acc_t>(r) && grad_log_tail.at<acc_t>(r) == acc_t(0) &&
           grad_entropy.at<acc_t>(r) == acc_t(0) && grad_mean_logit.at<acc_t>(r) == acc_t(0) &&
           grad_collision.at<acc_t>(r) == acc_t(0);
  }

  // `mass` is that of the row's entries in the loss. `grad_sum` is the sum of the entries' grad_outputs.
  template <typename acc_t>
  SCE_HD SelectCoefficients<acc_t> select_coefficients(int64_t r, acc_t mass, acc_t grad_sum) const {
    SelectCoefficients<acc_t> c(coefficients(r, mass));
    const acc_t of_log_tail = log_tail ? static_cast<const acc_t*>(log_tail)[r] : acc_t(0);
    if (of_log_tail != -acc_t(INFINITY)) {  // otherwise there is no class outside S
      c.of_tail = grad_log_tail.at<acc_t>(r);
      c.log_tail = of_log_tail;
    }
    c.of_entropy = grad_entropy.at<acc_t>(r);
    c.entropy = entropy ? static_cast<const acc_t*>(entropy)[r] : acc_t(0);
    c.of_each = grad_mean_logit.at<acc_t>(r) / static_cast<acc_t>(target.num_classes);
    c.of_squares = acc_t(2) * grad_collision.at<acc_t>(r);
    if (collision) c.collision = static_cast<const acc_t*>(collision)[r];
    c.of_square = c.of_squares * exponential(-c.collision);
    c.a -= grad_sum;
    return c.of_classes(/*inside=*/false);
  }
};

namespace cpu {
void select_forward(const SelectArgs& args);
void select_merge(const SelectMergeArgs& args);
void select_backward(const SelectBackwardArgs& args);
}  // namespace cpu

}  // namespace sparse_ce
