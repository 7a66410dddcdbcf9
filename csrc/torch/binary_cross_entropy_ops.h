// binary_cross_entropy_ops.h - Implements the ops of binary cross entropy on tensors, for CPU and CUDA.
#pragma once

#include "device.h"
#include "views.h"

#include <tuple>

namespace sparse_ce {

template <typename device_t>
class BinaryCrossEntropyOps {
 public:
  static Tensor forward(const Tensor& logits, const BinaryArguments& inputs) {
    Call call(logits, inputs);
    const Tensor loss = call.new_loss();
    call.run();
    return loss;
  }

  static std::tuple<Tensor, Tensor, Tensor> with_gradient(const Tensor& grad, const Tensor& logits,
                                                          const BinaryArguments& inputs, bool affine_grad) {
    Call call(logits, inputs);
    const Tensor loss = call.new_loss(), of_affine = call.new_affine_gradient(affine_grad);
    call.view_grad(grad);
    const Tensor gradient = call.new_gradient();
    call.run();
    return {loss, gradient, of_affine};
  }

  static std::tuple<Tensor, Tensor> with_gradient_(const Tensor& grad, const Tensor& logits,
                                                   const BinaryArguments& inputs, bool affine_grad) {
    Call call(logits, inputs);
    const Tensor loss = call.new_loss(), of_affine = call.new_affine_gradient(affine_grad);
    call.view_grad(grad);
    call.overwrite(grad);
    call.run();
    return {loss, of_affine};
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("binary_cross_entropy", boxed<&forward>);
    m.impl("binary_cross_entropy_with_gradient", boxed<&with_gradient>);
    m.impl("binary_cross_entropy_with_gradient_", boxed<&with_gradient_>);
  }

 private:
  // Checks and views the arguments of a call.
  class Call {
   public:
    Call(const Tensor& logits, const BinaryArguments& inputs) : logits_(logits), inputs_(inputs), args_{} {
      view_logits(logits, owned_, args_);
      args_.binary = inputs.options();
      if (inputs.first_class) {
        check_shard(inputs.num_classes, *inputs.first_class);
        args_.first_class = *inputs.first_class;
        args_.vocab += args_.first_class;
      } else {
        check(args_.vocab > 0, "logits must have at least one class, got ", shape(logits));
        const int64_t classes = inputs.num_classes.value_or(args_.vocab);
        check(classes > 0 && classes <= args_.vocab, "num_classes must be in [1, ", args_.vocab,
              "] (the columns of logits), got ", classes);
      }
      args_.target = view_target(inputs, inputs.num_classes.value_or(args_.vocab), owned_);
      args_.target.logprobs = inputs.values && inputs.logprobs;
      if (inputs.pos_weight) args_.pos_weight = view_vector(*inputs.pos_weight, "pos_weight", args_.target.num_classes);
      if (inputs.affine) args_.affine = view_vector(*inputs.affine, "affine", 2);
    }

    Tensor new_loss() {
      Tensor loss = empty(logits_, {args_.rows}, arithmetic_dtype(logits_));
      args_.loss = mutable_origin(loss);
      return loss;
    }
    Tensor new_affine_gradient(bool requested) {
      Tensor gradient = empty(logits_, {requested ? args_.rows : 0, 2}, arithmetic_dtype(logits_));
      if (requested) args_.grad_affine = mutable_origin(gradient);
      return gradient;
    }
    void view_grad(const Tensor& grad) { args_.grad_loss = view_rows(grad, logits_, "grad", args_.grad_loss_stride); }
    Tensor new_gradient() {
      Tensor gradient = device_t().empty_output(logits_, {args_.rows, logits_.size(1)}, logits_.scalar_type());
      args_.grad_logits = mutable_origin(gradient);
      args_.grad_row_stride = logits_.size(1);
      return gradient;
    }
    void overwrite(const Tensor& grad) {
      check_overwritable(logits_, args_);
      const Overwritten overwritten(logits_, "logits");
      check_apart(overwritten, inputs_);
      overwritten.check_apart(grad, "grad", inputs_.pos_weight, "pos_weight", inputs_.affine, "affine");
      args_.grad_logits = mutable_origin(logits_);
      args_.grad_row_stride = args_.row_stride;
    }

    void run() const {
      if (args_.rows == 0) return;
      device_t().check_target(args_.target, logits_);
      device_t().binary_cross_entropy(args_, logits_);
    }

   private:
    const void* view_vector(const Tensor& t, const char* argument, int64_t size) {
      check_same_device(t, logits_, argument);
      check(t.scalar_type() == arithmetic_dtype(logits_), argument, " must be of dtype ",
            name(arithmetic_dtype(logits_)), ", got ", name(t.scalar_type()));
      check(t.dim() == 1 && t.size(0) == size, argument, " must be (", size, ",), got ", shape(t));
      vectors_.push_back(packed(t));
      return origin(vectors_.back());
    }

    const Tensor& logits_;
    const BinaryArguments& inputs_;
    BinaryArgs args_;
    Owned owned_;
    std::vector<Tensor> vectors_;
  };
};

}  // namespace sparse_ce
