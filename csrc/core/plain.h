// plain.h - Computes cross entropy of one row, and its gradient, as plain loops. Read this file first. The kernels
// compute the same in tiles, vectors and threads, and keep more digits; tests compare them with it. No kernel uses it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace sparse_ce {
namespace plain {

// With logits x of V classes, entries (class c_k, weight w_k) and class weights o:
//
//   z_j    = cap tanh(scale x_j / cap), or scale x_j without a softcap
//   lse    = log(sum_j exp(z_j)),  p_j = exp(z_j - lse)
//   t_j    = o_j [(1 - e) sum_{k: c_k = j} w_k + e / V]     the weight of class j, with label smoothing e
//   loss   = sum_j t_j (lse - z_j) + z_loss lse^2
//   grad_j = [(sum_i t_i + 2 z_loss lse) p_j - t_j] dz_j/dx_j
struct Options {
  double label_smoothing = 0, z_loss = 0, scale = 1, cap = 0;  // a cap of 0 means none
};

struct Row {
  double loss = 0, lse = 0;
  std::vector<double> grad;
};

inline Row cross_entropy(const std::vector<double>& x, const std::vector<int>& classes,
                         const std::vector<double>& weights, const std::vector<double>& class_weights,
                         const Options& options) {
  const size_t vocab = x.size();
  std::vector<double> z(vocab), slope(vocab), target(vocab);
  for (size_t j = 0; j < vocab; ++j) {
    const double t = options.cap == 0 ? 0 : std::tanh(options.scale * x[j] / options.cap);
    z[j] = options.cap == 0 ? options.scale * x[j] : options.cap * t;
    slope[j] = options.scale * (1 - t * t);
    target[j] = options.label_smoothing / static_cast<double>(vocab);
  }
  for (size_t k = 0; k < classes.size(); ++k)
    target[static_cast<size_t>(classes[k])] += (1 - options.label_smoothing) * weights[k];

  // Relative to the largest logit, no exponential overflows. The kernels also leave it out of the sum, whose digits it
  // would hide.
  const double max = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (size_t j = 0; j < vocab; ++j) sum += std::exp(z[j] - max);

  Row row;
  row.lse = max + std::log(sum);
  double mass = 0;
  for (size_t j = 0; j < vocab; ++j) {
    target[j] *= class_weights[j];
    mass += target[j];
    row.loss += target[j] * (row.lse - z[j]);
  }
  row.loss += options.z_loss * row.lse * row.lse;
  for (size_t j = 0; j < vocab; ++j)
    row.grad.push_back(((mass + 2 * options.z_loss * row.lse) * std::exp(z[j] - row.lse) - target[j]) * slope[j]);
  return row;
}

}  // namespace plain
}  // namespace sparse_ce
