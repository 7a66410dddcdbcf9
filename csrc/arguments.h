// arguments.h - the arguments that the losses share, once: as the schema has them and as the ops do. A new option is a
// line in each here, with what it must be, and its part in math.h's formula.
#pragma once

#include "boxing.h"
#include "math.h"

#include <cmath>

namespace sparse_ce {

#define SCE_TARGET                                                                                          \
  "Tensor indices, Tensor? values=None, Tensor? offsets=None, Tensor? weight=None, Tensor? row_mask=None, " \
  "int ignore_index=-100"
struct TargetArguments : OnStack {
  using OnStack::OnStack;
  Tensor indices = next<Tensor>();
  OptionalTensor values = next<OptionalTensor>();
  OptionalTensor offsets = next<OptionalTensor>();
  OptionalTensor weight = next<OptionalTensor>();
  OptionalTensor row_mask = next<OptionalTensor>();
  int64_t ignore_index = next<int64_t>();
};

#define SCE_ARGUMENTS                                                                                               \
  SCE_TARGET                                                                                                        \
  ", float label_smoothing=0., float z_loss=0., float logit_scale=1., float? softcap=None, int? num_classes=None, " \
  "bool logprobs=False, Tensor? row_scale=None"
struct Arguments : TargetArguments {
  using TargetArguments::TargetArguments;
  double label_smoothing = next<double>();
  double z_loss = next<double>();
  double logit_scale = next<double>();
  std::optional<double> softcap = next<std::optional<double>>();
  std::optional<int64_t> num_classes = next<std::optional<int64_t>>();
  bool logprobs = next<bool>();
  OptionalTensor row_scale = next<OptionalTensor>();

  // `classes`: what there are `vocab` of.
  void check_options(int64_t vocab, const char* classes) const {
    check(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing must be in [0, 1], got ", label_smoothing);
    check(std::isfinite(z_loss) && z_loss >= 0, "z_loss must be finite and not negative, got ", z_loss);
    check(std::isfinite(logit_scale), "logit_scale must be finite, got ", logit_scale);
    check(!softcap || (std::isfinite(*softcap) && *softcap > 0), "softcap must be a positive number or None, got ",
          softcap.value_or(0));
    check(!num_classes || (*num_classes > 0 && *num_classes <= vocab), "num_classes must be in [1, ", vocab, "], ",
          classes, ", got ", num_classes.value_or(0));
  }
  LossOptions options() const { return {label_smoothing, z_loss, logit_scale, softcap.value_or(0)}; }
};

#define SCE_HEAD "Tensor input, Tensor linear_weight, Tensor? linear_bias"
struct HeadArguments : OnStack {
  using OnStack::OnStack;
  Tensor input = next<Tensor>();
  Tensor weight = next<Tensor>();
  OptionalTensor bias = next<OptionalTensor>();
};

// Upstream gradients: of the loss, and of what select gives beside it.
#define SCE_UPSTREAM                                                                                                   \
  "Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_log_probs, Tensor? grad_log_rest, Tensor? grad_entropy, Tensor? " \
  "grad_mean_logit"
struct Upstreams : OnStack {
  using OnStack::OnStack;
  OptionalTensor loss = next<OptionalTensor>();
  OptionalTensor lse = next<OptionalTensor>();
  OptionalTensor log_probs = next<OptionalTensor>();
  OptionalTensor log_rest = next<OptionalTensor>();
  OptionalTensor entropy = next<OptionalTensor>();
  OptionalTensor mean_logit = next<OptionalTensor>();
};

// The outputs of select that are asked for.
#define SCE_OUTPUTS                                                                                            \
  "float? padding_value=None, bool loss=False, bool log_probs=True, bool log_rest=False, bool entropy=False, " \
  "bool mean_logit=False, bool argmax=False"
struct Outputs : OnStack {
  using OnStack::OnStack;
  std::optional<double> padding_value = next<std::optional<double>>();  // -inf by default
  bool loss = next<bool>();
  bool log_probs = next<bool>();
  bool log_rest = next<bool>();
  bool entropy = next<bool>();
  bool mean_logit = next<bool>();
  bool argmax = next<bool>();
};

// The gradients that are asked for.
#define SCE_WANTED "bool input_grad=True, bool weight_grad=True, bool bias_grad=True, bool values_grad=False"
struct Wanted : OnStack {
  using OnStack::OnStack;
  bool input = next<bool>();
  bool weight = next<bool>();
  bool bias = next<bool>();
  bool values = next<bool>();
};

}  // namespace sparse_ce
