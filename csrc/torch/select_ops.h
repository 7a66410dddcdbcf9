// select_ops.h - Implements the select ops on tensors, for CPU and CUDA.
#pragma once

#include "device.h"
#include "views.h"

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace sparse_ce {

using SelectResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline RequestedOutputs view_requested(const Outputs& outputs) {
  return {outputs.loss,       outputs.log_probs, outputs.log_tail,  outputs.entropy,
          outputs.mean_logit, outputs.argmax,    outputs.collision, outputs.rank};
}

// Allocates the outputs for `count` rows. An output that is not requested is a new tensor of shape (0,), because two
// outputs of an op must not be the same tensor.
struct SelectOutputs {
  SelectOutputs(const Tensor& like, int64_t count, const Tensor& indices, const Outputs& outputs)
      : outputs(outputs), dtype(arithmetic_dtype(like)), loss(rows(like, count, outputs.loss)),
        lse(rows(like, count, true)), lse_residual(rows(like, count, true)),
        log_probs(outputs.log_probs ? torch::stable::new_empty(indices, indices.sizes(), dtype) : rows(like, 0, true)),
        log_tail(rows(like, count, outputs.log_tail)), entropy(rows(like, count, outputs.entropy)),
        mean_logit(rows(like, count, outputs.mean_logit)),
        argmax(empty(like, {outputs.argmax ? count : 0}, ScalarType::Long)),
        collision(rows(like, count, outputs.collision)),
        rank(empty(like, {outputs.rank ? count : 0}, ScalarType::Long)) {
    const double most =
        dtype == ScalarType::Double ? std::numeric_limits<double>::max() : double(std::numeric_limits<float>::max());
    check(!std::isfinite(padding_value()) || std::abs(padding_value()) <= most,
          "padding_value must be representable in ", name(dtype), ", got ", padding_value());
  }

  double padding_value() const { return outputs.padding_value.value_or(-INFINITY); }

  // Sets the output pointers.
  void place(SelectArgs& args) const {
    const auto of = [](bool is_requested, const Tensor& t) { return is_requested ? mutable_origin(t) : nullptr; };
    args.loss = of(outputs.loss, loss);
    args.lse = mutable_origin(lse);
    args.lse_residual = mutable_origin(lse_residual);
    args.log_probs = of(outputs.log_probs, log_probs);
    args.log_tail = of(outputs.log_tail, log_tail);
    args.entropy = of(outputs.entropy, entropy);
    args.mean_logit = of(outputs.mean_logit, mean_logit);
    args.argmax = static_cast<int64_t*>(of(outputs.argmax, argmax));
    args.collision = of(outputs.collision, collision);
    args.rank = static_cast<int64_t*>(of(outputs.rank, rank));
    args.padding_value = padding_value();
    args.outputs = view_requested(outputs);
  }

  SelectResults results() const {
    return {loss, lse, lse_residual, log_probs, log_tail, entropy, mean_logit, argmax, collision, rank};
  }

  const Outputs& outputs;
  ScalarType dtype;
  Tensor loss, lse, lse_residual, log_probs, log_tail, entropy, mean_logit, argmax, collision, rank;

 private:
  Tensor rows(const Tensor& like, int64_t count, bool is_requested) const {
    return empty(like, {is_requested ? count : 0}, arithmetic_dtype(like));
  }
};

// Checks and stores the arguments of a backward for all rows. `like` has the device, dtype and rows of the logits.
struct SelectGradOutputs {
  SelectGradOutputs(const GradOutputs& grad, const Tensor& like, const SavedOutputs& outputs, const Tensor& indices,
                    const CrossEntropyArgs& rows) {
    static_cast<BackwardArgs&>(args) =
        view_grad_outputs(rows, like, grad.loss, grad.lse, outputs.lse, outputs.lse_residual);
    if (grad.log_probs) {
      const Tensor& of_entries = *grad.log_probs;
      check_same_device(of_entries, like, "grad_log_probs");
      check(of_entries.scalar_type() == arithmetic_dtype(like), "grad_log_probs must be of dtype ",
            name(arithmetic_dtype(like)), ", got ", name(of_entries.scalar_type()));
      check(of_entries.dim() == indices.dim() && same_sizes(of_entries.sizes(), indices.sizes()),
            "grad_log_probs must have the shape of indices ", shape(indices), ", got ", shape(of_entries));
      owned.push_back(packed(of_entries));
      args.grad_log_probs = origin(owned.back());
    }
    view(grad.log_tail, like, "grad_log_tail", args.grad_log_tail);
    view(grad.entropy, like, "grad_entropy", args.grad_entropy);
    view(grad.mean_logit, like, "grad_mean_logit", args.grad_mean_logit);
    view(grad.collision, like, "grad_collision", args.grad_collision);
    args.log_tail = saved(outputs.log_tail, grad.log_tail, like, "log_tail");
    args.entropy = saved(outputs.entropy, grad.entropy, like, "entropy");
    args.collision = saved(outputs.collision, grad.collision, like, "collision");
  }

  std::vector<Tensor> owned;
  SelectBackwardArgs args{};

 private:
  static void view(const OptionalTensor& grad, const Tensor& like, const char* argument, RowGradOutput& out) {
    if (grad) out.grad = view_rows(*grad, like, argument, out.stride);
  }
  // Returns the output of forward that its gradient needs.
  static const void* saved(const OptionalTensor& saved, const OptionalTensor& grad, const Tensor& like,
                           const char* argument) {
    if (!grad) return nullptr;
    check(saved.has_value(), argument, " must be the output of select if its gradient is given, got None");
    int64_t stride = 1;
    const void* data = view_rows(*saved, like, argument, stride);
    check(like.size(0) <= 1 || stride == 1, argument, " must be contiguous, got stride ", stride);
    return data;
  }
};

template <typename device_t>
class SelectOps {
 public:
  static SelectResults select(const Tensor& logits, const Arguments& inputs, const Outputs& outputs) {
    Owned owned;
    SelectArgs args{};
    view_call(logits, inputs, owned, args);
    if (args.rows > 0) device_t().check_target(args.target, logits);
    const SelectOutputs out = allocate(logits, args, inputs, outputs);
    if (args.rows > 0) device_t().select_forward(args, logits);
    return out.results();
  }

  static std::tuple<Tensor, Tensor> shard(const Tensor& logits, const Arguments& inputs, const Outputs& outputs,
                                          int64_t first_class, const OptionalTensor& ranked_logits) {
    Owned owned;
    SelectArgs args{};
    view_call(logits, inputs, owned, args, /*strided=*/false, first_class);
    if (args.rows > 0) device_t().check_target(args.target, logits);
    args.outputs = view_requested(outputs);
    const ScalarType dtype = arithmetic_dtype(logits);
    const Tensor statistics = empty(logits, {args.rows, numbers(args)}, dtype);
    args.statistics = mutable_origin(statistics);
    const Tensor chosen = outputs.log_probs ? torch::stable::new_zeros(inputs.indices, inputs.indices.sizes(), dtype)
                                            : empty(logits, {0}, dtype);
    args.chosen = mutable_origin(chosen);
    if (outputs.rank) {
      int64_t stride = 1;
      check(ranked_logits.has_value(), "ranked_logits must be given if the rank is requested, got None");
      args.ranked = view_rows(*ranked_logits, logits, "ranked_logits", stride);
      check(args.rows <= 1 || stride == 1, "ranked_logits must be contiguous, got stride ", stride);
    }
    if (args.rows > 0) device_t().select_forward(args, logits);
    return {statistics, chosen};
  }

  static SelectResults merge(const Tensor& statistics, int64_t shards, const OptionalTensor& chosen,
                             const Arguments& inputs, const Outputs& outputs) {
    check(statistics.dim() == 2 && shards > 0 && statistics.size(0) % shards == 0,
          "statistics must be (shards * rows, numbers), got ", shape(statistics), " for ", shards, " shards");
    Owned owned;
    SelectMergeArgs args{};
    Tensor all = packed(statistics);
    const Tensor rows = torch::stable::narrow(all, 0, 0, all.size(0) / shards);
    check(inputs.num_classes.has_value(), "num_classes must be the number of classes of all shards, got None");
    view_logits(rows, owned, args);
    args.vocab = *inputs.num_classes;
    inputs.check_options(args.vocab, "the classes of all shards");
    view_arguments(inputs, owned, args);
    if (args.rows > 0) device_t().check_target(args.target, rows);
    const SelectOutputs out = allocate(rows, args, inputs, outputs);
    check(all.scalar_type() == arithmetic_dtype(all) && all.size(1) == numbers(args), "statistics must have ",
          numbers(args), " numbers per row in float32 or float64, got ", shape(all), " of ", name(all.scalar_type()));
    Tensor logits;
    if (outputs.log_probs) {
      check(chosen && chosen->scalar_type() == all.scalar_type() && same_sizes(chosen->sizes(), inputs.indices.sizes()),
            "chosen must have the shape of indices ", shape(inputs.indices), " and the dtype of statistics");
      check_same_device(*chosen, all, "chosen");
      logits = packed(*chosen);
      args.logits_of_entries = origin(logits);
    }
    args.gathered = all.const_data_ptr();
    args.shards = shards;
    if (args.rows > 0) device_t().select_merge(args, all);
    return out.results();
  }

  static std::tuple<Tensor, Tensor> backward(const GradOutputs& grad, const Tensor& logits, const SavedOutputs& outputs,
                                             const Arguments& inputs, bool scale_grad,
                                             std::optional<int64_t> first_class) {
    Call call(grad, logits, outputs, inputs, scale_grad, first_class);
    SelectBackwardArgs& args = call.args;
    Tensor grad_logits = device_t().empty_output(logits, {args.rows, logits.size(1)}, logits.scalar_type());
    args.grad_logits = mutable_origin(grad_logits);
    args.grad_row_stride = logits.size(1);
    call.run(logits);
    return {grad_logits, call.grad_scale};
  }

  static Tensor backward_(const GradOutputs& grad, const Tensor& logits, const SavedOutputs& outputs,
                          const Arguments& inputs, bool scale_grad, std::optional<int64_t> first_class) {
    Call call(grad, logits, outputs, inputs, scale_grad, first_class);
    SelectBackwardArgs& args = call.args;
    check_overwritable(logits, args);
    const Overwritten overwritten(logits, "logits");
    check_apart(overwritten, inputs);
    overwritten.check_apart(outputs.lse, "lse", outputs.lse_residual, "lse_residual", outputs.log_tail, "log_tail",
                            outputs.entropy, "entropy", outputs.collision, "collision");
    overwritten.check_apart(grad.loss, "grad_loss", grad.lse, "grad_lse", grad.log_probs, "grad_log_probs",
                            grad.log_tail, "grad_log_tail", grad.entropy, "grad_entropy", grad.mean_logit,
                            "grad_mean_logit", grad.collision, "grad_collision");
    args.grad_logits = mutable_origin(logits);
    args.grad_row_stride = args.row_stride;
    call.run(logits);
    return call.grad_scale;
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("select", boxed<&select>);
    m.impl("select_shard", boxed<&shard>);
    m.impl("select_merge", boxed<&merge>);
    m.impl("select_backward", boxed<&backward>);
    m.impl("select_backward_", boxed<&backward_>);
  }

 private:
  static SelectOutputs allocate(const Tensor& like, SelectArgs& args, const Arguments& inputs, const Outputs& outputs) {
    SelectOutputs out(like, args.rows, inputs.indices, outputs);
    // An entry may belong to no row.
    if (outputs.log_probs && args.target.offsets) torch::stable::fill_(out.log_probs, out.padding_value());
    out.place(args);
    return out;
  }
  // Returns the number of statistics per row of a shard.
  static int64_t numbers(const SelectArgs& args) {
    return ShardStats<float>::numbers(args.outputs, args.needs_smoothing());
  }

  // Checks and stores the arguments of both backward ops.
  struct Call {
    Call(const GradOutputs& grad, const Tensor& logits, const SavedOutputs& outputs, const Arguments& inputs,
         bool scale_grad, std::optional<int64_t> first_class)
        : grad_outputs(grad, logits, outputs, inputs.indices, rows_of_call(logits, inputs, first_class)),
          args(grad_outputs.args),
          grad_scale(empty(logits, {scale_grad ? logits.size(0) : 0}, arithmetic_dtype(logits))),
          of_loss(grad.loss && !grad.log_probs && !grad.log_tail && !grad.entropy && !grad.mean_logit &&
                  !grad.collision && !scale_grad) {
      if (args.rows > 0) device_t().check_target(args.target, logits);
      if (scale_grad) args.grad_scale = grad_scale.mutable_data_ptr();
    }
    void run(const Tensor& logits) const {
      if (args.rows == 0) return;
      of_loss ? device_t().cross_entropy_backward(args, logits) : device_t().select_backward(args, logits);
    }
    CrossEntropyArgs rows_of_call(const Tensor& logits, const Arguments& inputs, std::optional<int64_t> first_class) {
      CrossEntropyArgs rows{};
      view_call(logits, inputs, owned, rows, /*strided=*/false, first_class);
      return rows;
    }

    Owned owned;
    SelectGradOutputs grad_outputs;
    SelectBackwardArgs& args;
    Tensor grad_scale;
    bool of_loss;  // only the loss and lse have a gradient
  };
};

}  // namespace sparse_ce
