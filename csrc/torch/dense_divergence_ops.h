// dense_divergence_ops.h - Implements the ops of dense divergences on tensors, for CPU and CUDA.
#pragma once

#include "arguments.h"
#include "device.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace sparse_ce {

template <typename device_t>
class DenseDivergenceOps {
 public:
  static std::tuple<Tensor, Tensor> forward(const DenseArguments& inputs) {
    Call call(inputs, DenseStep::kForward);
    const Tensor stats = call.new_stats(), sums = call.new_sums();
    call.run();
    return {stats, sums};
  }

  static std::tuple<Tensor, Tensor, Tensor> with_gradient(const Tensor& grad, const DenseArguments& inputs) {
    Call call(inputs, DenseStep::kWithGradient);
    const Tensor stats = call.new_stats(), sums = call.new_sums();
    call.view_grad(grad);
    const Tensor gradient = call.new_gradient();
    call.run();
    return {stats, sums, gradient};
  }
  static std::tuple<Tensor, Tensor> with_gradient_(const Tensor& grad, const DenseArguments& inputs) {
    Call call(inputs, DenseStep::kWithGradient);
    const Tensor stats = call.new_stats(), sums = call.new_sums();
    call.view_grad(grad);
    call.overwrite().check_apart(grad, "grad");
    call.run();
    return {stats, sums};
  }

  static Tensor stats(const DenseArguments& inputs) {
    Call call(inputs, DenseStep::kStatistics);
    const Tensor stats = call.new_stats();
    call.run();
    return stats;
  }
  static Tensor sums(const Tensor& stats, const DenseArguments& inputs) {
    Call call(inputs, DenseStep::kSums);
    call.view_stats(stats);
    const Tensor sums = call.new_sums();
    call.run();
    return sums;
  }

  static Tensor backward(const Tensor& grad, const Tensor& stats, const Tensor& sums, const DenseArguments& inputs) {
    Call call(inputs, DenseStep::kGradient);
    call.view_grad(grad);
    call.view_stats(stats);
    call.view_sums(sums);
    const Tensor gradient = call.new_gradient();
    call.run();
    return gradient;
  }
  static void backward_(const Tensor& grad, const Tensor& stats, const Tensor& sums, const DenseArguments& inputs) {
    overwrite(&Call::overwrite, grad, stats, sums, inputs);
  }
  static void backward_teacher_(const Tensor& grad, const Tensor& stats, const Tensor& sums,
                                const DenseArguments& inputs) {
    overwrite(&Call::overwrite_teacher, grad, stats, sums, inputs);
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("dense_divergence", boxed<&forward>);
    m.impl("dense_divergence_with_gradient", boxed<&with_gradient>);
    m.impl("dense_divergence_with_gradient_", boxed<&with_gradient_>);
    m.impl("dense_divergence_stats", boxed<&stats>);
    m.impl("dense_divergence_sums", boxed<&sums>);
    m.impl("dense_divergence_backward", boxed<&backward>);
    m.impl("dense_divergence_backward_", boxed<&backward_>);
    m.impl("dense_divergence_backward_teacher_", boxed<&backward_teacher_>);
  }

 private:
  class Call;

  static void overwrite(Overwritten (Call::*target)(), const Tensor& grad, const Tensor& stats, const Tensor& sums,
                        const DenseArguments& inputs) {
    Call call(inputs, DenseStep::kGradient);
    call.view_grad(grad);
    call.view_stats(stats);
    call.view_sums(sums);
    const Overwritten overwritten = (call.*target)();
    overwritten.check_apart(grad, "grad", stats, "stats", sums, "sums");
    call.run();
  }

  // Checks and views the arguments of a call.
  class Call {
   public:
    Call(const DenseArguments& inputs, DenseStep step) : inputs_(inputs), logits_(inputs.logits), args_{} {
      args_.step = step;
      view_logits(logits_, "logits", inputs.logit_scale, inputs.softcap, inputs.row_scale, "row_scale", args_.student);
      args_.rows = logits_.size(0);
      args_.columns = logits_.size(1);
      const Tensor& teacher = inputs.teacher;
      view_logits(teacher, "teacher", inputs.teacher_logit_scale, inputs.teacher_softcap, inputs.teacher_row_scale,
                  "teacher_row_scale", args_.teacher);
      check_same_device(teacher, logits_, "teacher");
      check(teacher.size(0) == args_.rows, "teacher must have the rows of logits, ", args_.rows, ", got ",
            shape(teacher));
      view_classes();
      check(inputs.kind >= 0 && inputs.kind <= static_cast<int64_t>(Divergence::kSeveral),
            "kind must be in [0, 8], got ", inputs.kind);
      args_.kind = static_cast<Divergence>(inputs.kind);
      check(inputs.beta > 0 && inputs.beta < 1, "beta must be between 0 and 1, got ", inputs.beta);
      args_.beta = inputs.beta;
      if (inputs.row_mask) view_mask(*inputs.row_mask);
      if (inputs.labels) view_labels(*inputs.labels);
    }

    Tensor new_stats() {
      Tensor stats = empty(logits_, {args_.rows, kDenseStats}, arithmetic_dtype(logits_));
      args_.stats = mutable_origin(stats);
      return stats;
    }
    Tensor new_sums() {
      Tensor sums = empty(logits_, {2 * count() + 2, args_.rows}, arithmetic_dtype(logits_));
      args_.sums = mutable_origin(sums);
      return sums;
    }
    Tensor new_gradient() {
      Tensor gradient = device_t().empty_output(logits_, {args_.rows, args_.columns}, logits_.scalar_type());
      args_.grad = mutable_origin(gradient);
      args_.grad_row_stride = args_.columns;
      return gradient;
    }
    // Makes the gradient overwrite the logits.
    Overwritten overwrite() { return overwrite(logits_, "logits", inputs_.teacher, "teacher"); }
    Overwritten overwrite_teacher() {
      const Tensor& teacher = inputs_.teacher;
      check(teacher.scalar_type() == logits_.scalar_type() && teacher.size(1) == args_.columns,
            "teacher must have the dtype and shape of logits, ", name(logits_.scalar_type()), " ", shape(logits_),
            ", to be overwritten, got ", name(teacher.scalar_type()), " ", shape(teacher));
      return overwrite(teacher, "teacher", logits_, "logits");
    }

    void view_grad(const Tensor& grad) { args_.grad_sums = view(grad, "grad", count() + 1, args_.rows); }
    void view_stats(const Tensor& stats) {
      args_.stats = const_cast<void*>(view(stats, "stats", args_.rows, kDenseStats));
    }
    void view_sums(const Tensor& sums) {
      args_.sums = const_cast<void*>(view(sums, "sums", 2 * count() + 2, args_.rows));
    }

    void run() const {
      if (args_.rows > 0) device_t().dense_divergence(args_, logits_);
    }

   private:
    int64_t count() const { return divergence_count(args_.kind); }

    Overwritten overwrite(const Tensor& t, const char* argument, const Tensor& other, const char* other_argument) {
      check(args_.rows <= 1 || t.stride(0) >= args_.columns, argument,
            " must have non-overlapping rows to be overwritten, got row stride ", t.stride(0));
      check(args_.columns <= 1 || t.stride(1) == 1, argument, " must have column stride 1 to be overwritten, got ",
            t.stride(1));
      const Overwritten overwritten(t, argument);
      overwritten.check_apart(other, other_argument, inputs_.row_mask, "row_mask", inputs_.labels, "labels",
                              inputs_.row_scale, "row_scale", inputs_.teacher_row_scale, "teacher_row_scale");
      args_.grad = mutable_origin(t);
      args_.grad_row_stride = t.stride(0);
      return overwritten;
    }

    void view_logits(const Tensor& t, const char* argument, double scale, std::optional<double> softcap,
                     const OptionalTensor& row_scale, const char* scale_argument, DenseLogits& view) {
      check(t.dim() == 2, argument, " must be (rows, classes), got ", shape(t));
      view.dtype = to_dtype(t, argument, /*integer=*/false);
      view.data = origin(t);
      view.row_stride = t.stride(0);
      view.column_stride = t.size(1) == 1 ? 1 : t.stride(1);
      check_transform(scale, softcap);
      view.options.logit_scale = scale;
      view.options.softcap = softcap.value_or(0);
      if (row_scale) view.row_scale = view_scale(*row_scale, logits_, scale_argument, view.row_scale_stride);
    }

    void view_classes() {
      const int64_t columns = args_.columns, of_teacher = inputs_.teacher.size(1);
      if (inputs_.first_class) {
        check_shard(inputs_.num_classes, *inputs_.first_class);
        args_.first_class = *inputs_.first_class;
        total_ = *inputs_.num_classes;
        args_.classes = std::clamp<int64_t>(total_ - args_.first_class, 0, columns);
      } else {
        check(columns > 0, "logits must have at least one class, got ", shape(logits_));
        total_ = inputs_.num_classes.value_or(columns);
        check(total_ > 0 && total_ <= columns, "num_classes must be in [1, ", columns,
              "] (the columns of logits), got ", total_);
        args_.classes = total_;
      }
      const bool fits = inputs_.num_classes ? of_teacher >= args_.classes : of_teacher == columns;
      check(fits, "teacher must have the classes of logits, ", args_.classes, ", got ", shape(inputs_.teacher));
    }

    void view_mask(const Tensor& row_mask) {
      check_same_device(row_mask, logits_, "row_mask");
      check(row_mask.scalar_type() == ScalarType::Bool, "row_mask must be of dtype bool, got ",
            name(row_mask.scalar_type()));
      check(row_mask.dim() == 1 && row_mask.size(0) == args_.rows, "row_mask must be (", args_.rows, ",), got ",
            shape(row_mask));
      row_mask_ = packed(row_mask);
      args_.row_mask = static_cast<const bool*>(origin(*row_mask_));
    }

    void view_labels(const Tensor& labels) {
      check_same_device(labels, logits_, "labels");
      args_.labels_dtype = to_dtype(labels, "labels", /*integer=*/true);
      check(labels.dim() == 1 && labels.size(0) == args_.rows, "labels must be (", args_.rows, ",), got ",
            shape(labels));
      labels_ = packed(labels);
      args_.labels = origin(*labels_);
      if (!labels.is_cpu()) return;
      for (int64_t r = 0; r < args_.rows; ++r) {
        const int64_t label = load_int(args_.labels, args_.labels_dtype, r);
        check(label < total_, "labels must be in [0, ", total_, ") or negative, got ", label, " in row ", r);
      }
    }

    // Views a matrix of the arithmetic dtype.
    const void* view(const Tensor& t, const char* argument, int64_t rows, int64_t columns) {
      check_same_device(t, logits_, argument);
      check(t.scalar_type() == arithmetic_dtype(logits_), argument, " must be of dtype ",
            name(arithmetic_dtype(logits_)), ", got ", name(t.scalar_type()));
      check(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, argument, " must be (", rows, ", ", columns,
            "), got ", shape(t));
      owned_.push_back(packed(t));
      return origin(owned_.back());
    }

    const DenseArguments& inputs_;
    const Tensor& logits_;
    DenseDivergenceArgs args_;
    int64_t total_ = 0;  // classes of all shards
    OptionalTensor row_mask_, labels_;
    std::vector<Tensor> owned_;
  };
};

}  // namespace sparse_ce
