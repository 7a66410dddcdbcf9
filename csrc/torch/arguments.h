// arguments.h - Declares the arguments that several ops share, both in the schema and as C++ structs. Their order is
// the one of sparse_ce/_core/arguments.py. A new loss option needs a line in the schema, a member, a check, and a term
// in the formula of math.h.
#pragma once

#include "../core/binary_math.h"
#include "../core/math.h"
#include "boxing.h"

#include <cmath>

namespace sparse_ce {

#define SCE_TARGET                                                                                          \
  "Tensor indices, Tensor? values=None, Tensor? offsets=None, Tensor? weight=None, Tensor? row_mask=None, " \
  "SymInt ignore_index=-100"
struct TargetArguments : OnStack {
  using OnStack::OnStack;
  Tensor indices = next<Tensor>();
  OptionalTensor values = next<OptionalTensor>();
  OptionalTensor offsets = next<OptionalTensor>();
  OptionalTensor weight = next<OptionalTensor>();
  OptionalTensor row_mask = next<OptionalTensor>();
  int64_t ignore_index = next<int64_t>();
};

inline void check_transform(double logit_scale, std::optional<double> softcap) {
  check(std::isfinite(logit_scale), "logit_scale must be finite, got ", logit_scale);
  check(!softcap || (std::isfinite(*softcap) && *softcap > 0), "softcap must be a positive number or None, got ",
        softcap.value_or(0));
}

// Checks the position of a shard of the classes, which may be empty.
inline void check_shard(std::optional<int64_t> num_classes, int64_t first_class) {
  check(num_classes && *num_classes > 0,
        "num_classes must be the number of classes of all shards if first_class is given, got ",
        num_classes ? std::to_string(*num_classes) : "None");
  constexpr int64_t kMost = int64_t(1) << 48;  // far below the overflow of a class's position
  check(first_class >= 0 && first_class <= kMost, "first_class must be in [0, ", kMost, "], got ", first_class);
}

#define SCE_ARGUMENTS                                                                                                  \
  SCE_TARGET                                                                                                           \
  ", float label_smoothing=0., float z_loss=0., float logit_scale=1., float? softcap=None, SymInt? num_classes=None, " \
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

  // Checks the options. `classes` describes in the error message what `vocab` counts.
  void check_options(int64_t vocab, const char* classes) const {
    check(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing must be in [0, 1], got ", label_smoothing);
    check(std::isfinite(z_loss) && z_loss >= 0, "z_loss must be finite and not negative, got ", z_loss);
    check_transform(logit_scale, softcap);
    check(!num_classes || (*num_classes > 0 && *num_classes <= vocab), "num_classes must be in [1, ", vocab, "] (",
          classes, "), got ", num_classes.value_or(0));
  }
  LossOptions options() const {
    LossOptions options;
    options.label_smoothing = label_smoothing;
    options.z_loss = z_loss;
    options.logit_scale = logit_scale;
    options.softcap = softcap.value_or(0);
    return options;
  }
};

#define SCE_CANDIDATES                                                                                           \
  "Tensor indices, Tensor? values=None, Tensor? offsets=None, Tensor? row_mask=None, SymInt ignore_index=-100, " \
  "bool logprobs=False, float logit_scale=1., float? softcap=None"
struct CandidateArguments : OnStack {
  using OnStack::OnStack;
  Tensor indices = next<Tensor>();
  OptionalTensor values = next<OptionalTensor>();
  OptionalTensor offsets = next<OptionalTensor>();
  OptionalTensor row_mask = next<OptionalTensor>();
  int64_t ignore_index = next<int64_t>();
  bool logprobs = next<bool>();
  double logit_scale = next<double>();
  std::optional<double> softcap = next<std::optional<double>>();

  LossOptions options() const {
    check_transform(logit_scale, softcap);
    LossOptions options;
    options.logit_scale = logit_scale;
    options.softcap = softcap.value_or(0);
    return options;
  }
};

#define SCE_DENSE_AFTER_TEACHER                                                                                \
  "Tensor? row_mask=None, Tensor? labels=None, int kind=0, float beta=0.5, float logit_scale=1., "             \
  "float? softcap=None, float teacher_logit_scale=1., float? teacher_softcap=None, SymInt? num_classes=None, " \
  "Tensor? row_scale=None, Tensor? teacher_row_scale=None, SymInt? first_class=None"
#define SCE_DENSE_OPTIONS "Tensor teacher, " SCE_DENSE_AFTER_TEACHER
#define SCE_DENSE "Tensor logits, " SCE_DENSE_OPTIONS
struct DenseArguments : OnStack {
  using OnStack::OnStack;
  Tensor logits = next<Tensor>();
  Tensor teacher = next<Tensor>();
  OptionalTensor row_mask = next<OptionalTensor>();
  OptionalTensor labels = next<OptionalTensor>();
  int64_t kind = next<int64_t>();  // a Divergence
  double beta = next<double>();
  double logit_scale = next<double>();
  std::optional<double> softcap = next<std::optional<double>>();
  double teacher_logit_scale = next<double>();
  std::optional<double> teacher_softcap = next<std::optional<double>>();
  std::optional<int64_t> num_classes = next<std::optional<int64_t>>();
  OptionalTensor row_scale = next<OptionalTensor>();
  OptionalTensor teacher_row_scale = next<OptionalTensor>();
  std::optional<int64_t> first_class = next<std::optional<int64_t>>();
};

#define SCE_BINARY_OPTIONS                                                                              \
  SCE_TARGET                                                                                            \
  ", Tensor? pos_weight=None, Tensor? affine=None, float label_smoothing=0., float gamma_positive=0., " \
  "float gamma_negative=0., float clip=0., SymInt? num_classes=None, bool logprobs=False, SymInt? first_class=None"
#define SCE_BINARY "Tensor logits, " SCE_BINARY_OPTIONS
struct BinaryArguments : TargetArguments {
  using TargetArguments::TargetArguments;
  OptionalTensor pos_weight = next<OptionalTensor>();
  OptionalTensor affine = next<OptionalTensor>();
  double label_smoothing = next<double>();
  double gamma_positive = next<double>();
  double gamma_negative = next<double>();
  double clip = next<double>();
  std::optional<int64_t> num_classes = next<std::optional<int64_t>>();
  bool logprobs = next<bool>();
  std::optional<int64_t> first_class = next<std::optional<int64_t>>();

  BinaryOptions options() const {
    check(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing must be in [0, 1], got ", label_smoothing);
    check(std::isfinite(gamma_positive) && gamma_positive >= 0, "gamma_positive must be finite and not negative, got ",
          gamma_positive);
    check(std::isfinite(gamma_negative) && gamma_negative >= 0, "gamma_negative must be finite and not negative, got ",
          gamma_negative);
    check(clip >= 0 && clip < 1, "clip must be in [0, 1), got ", clip);
    return {label_smoothing, gamma_positive, gamma_negative, clip};
  }
};

#define SCE_HEAD "Tensor input, Tensor linear_weight, Tensor? linear_bias"
struct HeadArguments : OnStack {
  using OnStack::OnStack;
  Tensor input = next<Tensor>();
  Tensor weight = next<Tensor>();
  OptionalTensor bias = next<OptionalTensor>();

  void check_tensors() const {
    check(input.dim() == 2, "input must be (rows, width), got ", shape(input));
    to_dtype(input, "input", /*integer=*/false);
    check(weight.dim() == 2 && weight.size(1) == input.size(1), "linear_weight must be (vocab, ", input.size(1),
          ") to match input, got ", shape(weight));
    check(weight.size(0) > 0, "linear_weight must have at least one class, got ", shape(weight));
    check_operand(weight, "linear_weight");
    if (!bias) return;
    check(bias->dim() == 1 && bias->size(0) == weight.size(0), "linear_bias must be (", weight.size(0), ",), got ",
          shape(*bias));
    check_operand(*bias, "linear_bias");
  }

 private:
  // Checks device and dtype. Mixed precision allows float32 weights with 16-bit inputs.
  void check_operand(const Tensor& t, const char* argument) const {
    check_same_device(t, input, argument);
    const bool mixed = input.element_size() == 2 && t.scalar_type() == ScalarType::Float;
    check(mixed || t.scalar_type() == input.scalar_type(), argument, " must have the dtype of input (",
          name(input.scalar_type()), input.element_size() == 2 ? ") or float32" : ")", ", got ", name(t.scalar_type()));
  }
};

// Gradients of the loss and of the other outputs of select.
#define SCE_GRAD_OUTPUTS                                                                                               \
  "Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_log_probs, Tensor? grad_log_tail, Tensor? grad_entropy, Tensor? " \
  "grad_mean_logit, Tensor? grad_collision"
struct GradOutputs : OnStack {
  using OnStack::OnStack;
  OptionalTensor loss = next<OptionalTensor>();
  OptionalTensor lse = next<OptionalTensor>();
  OptionalTensor log_probs = next<OptionalTensor>();
  OptionalTensor log_tail = next<OptionalTensor>();
  OptionalTensor entropy = next<OptionalTensor>();
  OptionalTensor mean_logit = next<OptionalTensor>();
  OptionalTensor collision = next<OptionalTensor>();
};

// Outputs of select that its backward needs.
#define SCE_SAVED "Tensor lse, Tensor? lse_residual, Tensor? log_tail, Tensor? entropy, Tensor? collision"
struct SavedOutputs : OnStack {
  using OnStack::OnStack;
  Tensor lse = next<Tensor>();
  OptionalTensor lse_residual = next<OptionalTensor>();
  OptionalTensor log_tail = next<OptionalTensor>();
  OptionalTensor entropy = next<OptionalTensor>();
  OptionalTensor collision = next<OptionalTensor>();
};

// Selects the requested outputs of select.
#define SCE_OUTPUTS                                                                                            \
  "float? padding_value=None, bool loss=False, bool log_probs=True, bool log_tail=False, bool entropy=False, " \
  "bool mean_logit=False, bool argmax=False, bool collision=False, bool rank=False"
struct Outputs : OnStack {
  using OnStack::OnStack;
  std::optional<double> padding_value = next<std::optional<double>>();  // default: -inf
  bool loss = next<bool>();
  bool log_probs = next<bool>();
  bool log_tail = next<bool>();
  bool entropy = next<bool>();
  bool mean_logit = next<bool>();
  bool argmax = next<bool>();
  bool collision = next<bool>();
  bool rank = next<bool>();
};

// The outputs of select.
#define SCE_SELECTED_OUTPUTS                                                                                 \
  "Tensor loss, Tensor lse, Tensor lse_residual, Tensor log_probs, Tensor log_tail, Tensor entropy, Tensor " \
  "mean_logit, Tensor argmax, Tensor collision, Tensor rank"
#define SCE_SELECTED "(" SCE_SELECTED_OUTPUTS ")"

// Controls how a head computes its logits. `chunk_rows` defaults to a memory budget; `float32_logits` prevents rounding
// the logits to 16 bits. With `batch_invariant` the bits of a row do not depend on other rows.
#define SCE_CHUNKS "SymInt? chunk_rows=None, bool float32_logits=False, bool batch_invariant=False"

// Selects the gradients to compute for a head.
#define SCE_HEAD_NEEDS_GRAD "bool input_grad=True, bool weight_grad=True, bool bias_grad=True"
struct HeadNeedsGrad : OnStack {
  using OnStack::OnStack;
  bool input = next<bool>();
  bool weight = next<bool>();
  bool bias = next<bool>();
};

}  // namespace sparse_ce
