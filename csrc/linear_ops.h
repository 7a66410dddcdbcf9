// linear_ops.h - the ops of the linear head on tensors, for the CPU and for CUDA alike. `device_t` as for
// cross_entropy_ops.h and linear_head.h.
#pragma once

#include "cross_entropy_ops.h"
#include "linear_head.h"

#include <vector>

namespace sparse_ce {

template <typename device_t>
class LinearOps {
 public:
  static std::tuple<Tensor, Tensor> forward(const HeadArguments& head, const Arguments& given,
                                            std::optional<int64_t> chunk_rows) {
    const auto [loss, lse, residual] = run_forward(Call(head, given, chunk_rows));
    return {loss, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor> forward_with_residual(const HeadArguments& head, const Arguments& given,
                                                                  std::optional<int64_t> chunk_rows) {
    return run_forward(Call(head, given, chunk_rows));
  }

  static std::tuple<Tensor, Tensor> mean(const HeadArguments& head, const Arguments& given,
                                         const OptionalTensor& normalizer, std::optional<int64_t> chunk_rows) {
    const Call call(head, given, chunk_rows);
    const auto [loss, lse, residual] = run_forward(call);
    Tensor one = empty(head.input, {}, arithmetic_dtype(head.input));
    torch::stable::fill_(one, 1.0);
    LossMean<device_t> mean(call.args.target, head.input, normalizer, one);
    mean.finish(loss);
    return {mean.mean, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward_with_gradient(
      const Tensor& grad_mean, const OptionalTensor& normalizer, const HeadArguments& head, const Arguments& given,
      std::optional<int64_t> chunk_rows, const Wanted& wanted) {
    const Call call(head, given, chunk_rows);
    const Tensor& like = head.input;
    LossMean<device_t> mean(call.args.target, like, normalizer, grad_mean);
    const Rows rows(call);
    Gradients gradients(call, wanted);
    BackwardArgs backward{};
    static_cast<CrossEntropyArgs&>(backward) = call.live_args;
    backward.grad_loss = mean.grad_loss();
    backward.lse = rows.lse.const_data_ptr();
    backward.lse_residual = rows.residual.const_data_ptr();
    for_each_chunk(call, gradients.head, [&](int64_t begin, const Tensor& z) {
      const ForwardArgs forward = rows.chunk(call.live_args, begin, z);
      const BackwardArgs chunk = gradients.chunk(backward, begin, z);
      if (wanted.values) {  // needs the logits, which the gradient overwrites
        device_t::forward(forward, like);
        device_t::backward_values(chunk, like);
        device_t::backward(chunk, like);
      } else {
        device_t::forward_with_gradient(forward, chunk, like);
      }
      gradients.head.add_gradients(begin, z);
    });
    mean.finish(call.spread(rows.loss));
    auto [grad_input, grad_weight, grad_bias, grad_values] = gradients.tensors();
    return {mean.mean, mean.divisor, call.spread(rows.lse), call.spread(rows.residual), grad_input, grad_weight,
            grad_bias, grad_values};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_loss, const OptionalTensor& grad_lse,
                                                             const HeadArguments& head, const Tensor& lse,
                                                             const OptionalTensor& lse_residual, const Arguments& given,
                                                             std::optional<int64_t> chunk_rows, const Wanted& wanted) {
    const Call call(head, given, chunk_rows);
    BackwardArgs backward = view_upstream(call.args, head.input, grad_loss, grad_lse, lse, lse_residual);
    const auto held = call.keep_live(backward);
    Gradients gradients(call, wanted);
    for_each_chunk(call, gradients.head, [&](int64_t begin, const Tensor& z) {
      const BackwardArgs chunk = gradients.chunk(backward, begin, z);
      if (wanted.values) device_t::backward_values(chunk, head.input);
      if (!(wanted.input || wanted.weight || wanted.bias)) return;
      device_t::backward(chunk, head.input);
      gradients.head.add_gradients(begin, z);
    });
    return gradients.tensors();
  }

  static void scale_(const Tensor& gradient, const Tensor& scale) {
    ScaleArgs args{};
    args.scale = view_scalar(scale, gradient, "scale");
    args.dtype = to_dtype(gradient, "gradient", /*integer=*/false);
    check(gradient.is_contiguous(), "gradient must be contiguous, got shape ", shape(gradient));
    args.values = gradient.mutable_data_ptr();
    args.count = gradient.numel();
    if (args.count > 0) device_t::scale(args, gradient);
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("linear_forward", boxed<&forward>);
    m.impl("linear_forward_with_residual", boxed<&forward_with_residual>);
    m.impl("linear_forward_with_gradient", boxed<&forward_with_gradient>);
    m.impl("linear_backward", boxed<&backward>);
    m.impl("linear_mean", boxed<&mean>);
    m.impl("scale_", boxed<&scale_>);
  }

 private:
  static HeadArguments without_history(HeadArguments head) {
    head.input = detached(head.input), head.weight = detached(head.weight);
    if (head.bias) head.bias = detached(*head.bias);
    return head;
  }

  // What every op is called with, checked. The target's rows are the input's; logits come later, chunk by chunk.
  struct Call {
    Call(const HeadArguments& given_head, const Arguments& given, std::optional<int64_t> rows)
        : head(without_history(given_head)), chunk_rows(rows) {
      const Tensor &input = head.input, &weight = head.weight;
      head.check_tensors();
      check(!chunk_rows || *chunk_rows > 0, "chunk_rows must be positive, got ", chunk_rows.value_or(0));
      given.check_options(weight.size(0), "the rows of linear_weight");
      held.logits = input;
      args.rows = input.size(0);
      args.vocab = given.num_classes.value_or(weight.size(0));
      view_arguments(given, held, args);
      if (args.rows > 0) device_t::check_target(args.target, input);
      live = device_t::live_rows(args.target);
      live_args = args;
      if (!live) return;
      live_args.rows = live->count();
      live_args.target = live->view(args.target);
    }

    LinearHead<device_t> chunks() const {
      return {head.input, head.weight, head.bias, args.vocab, chunk_rows, live ? &*live : nullptr};
    }

    // What the rows that count have, (rows that count,), among zeros for the others: (rows,).
    Tensor spread(const Tensor& of_live) const {
      if constexpr (device_t::kLeavesOut) {
        if (live) {
          Tensor all = empty(of_live, {args.rows}, of_live.scalar_type());
          torch::stable::zero_(all);
          copy_each(of_live.const_data_ptr(), 1, nullptr, all.mutable_data_ptr(), live->rows.data());
          return all;
        }
      }
      return of_live;
    }

    // Makes the arrays of a backward, one element a row, those of the rows that count. Returns what holds them.
    std::vector<Tensor> keep_live(BackwardArgs& backward) const {
      std::vector<Tensor> held;
      if constexpr (device_t::kLeavesOut) {
        if (!live) return held;
        static_cast<CrossEntropyArgs&>(backward) = live_args;
        const auto keep = [&](const void*& array, int64_t stride) {
          if (!array) return;
          held.push_back(empty(head.input, {live->count()}, arithmetic_dtype(head.input)));
          copy_each(array, stride, live->rows.data(), held.back().mutable_data_ptr(), nullptr);
          array = held.back().const_data_ptr();
        };
        keep(backward.grad_loss, backward.grad_loss_stride);
        keep(backward.grad_lse, backward.grad_lse_stride);
        keep(backward.lse, 1);
        keep(backward.lse_residual, 1);
        backward.grad_loss_stride = backward.grad_lse_stride = 1;
      }
      return held;
    }

    void copy_each(const void* from, int64_t stride, const int64_t* from_rows, void* to, const int64_t* to_rows) const {
      if constexpr (device_t::kLeavesOut) {
        CopyRowsArgs copy{};
        copy.from = from;
        copy.to = to;
        copy.from_dtype = copy.to_dtype =
            arithmetic_dtype(head.input) == ScalarType::Double ? DType::kFloat64 : DType::kFloat32;
        copy.from_stride = stride;
        copy.to_stride = 1;
        copy.from_rows = from_rows;
        copy.to_rows = to_rows;
        copy.count = live->count();
        copy.width = 1;
        device_t::copy_rows(copy);
      }
    }

    HeadArguments head;
    std::optional<int64_t> chunk_rows;
    Held held;
    CrossEntropyArgs args{};         // of all rows
    std::optional<LiveRows> live;    // nothing: all of them
    CrossEntropyArgs live_args{};    // of these
  };

  // What forward gives for every row.
  struct Rows {
    explicit Rows(const Call& call) : loss(per_row(call)), lse(per_row(call)), residual(per_row(call)) {}
    static Tensor per_row(const Call& call) {
      return empty(call.head.input, {call.live_args.rows}, arithmetic_dtype(call.head.input));
    }

    ForwardArgs chunk(const CrossEntropyArgs& all, int64_t begin, const Tensor& z) const {
      ForwardArgs args{};
      static_cast<CrossEntropyArgs&>(args) = chunk_args(all, begin, z);
      const DType dtype = to_dtype(loss, "loss", /*integer=*/false);
      args.loss = advance(loss.mutable_data_ptr(), dtype, begin);
      args.lse = advance(lse.mutable_data_ptr(), dtype, begin);
      args.lse_residual = advance(residual.mutable_data_ptr(), dtype, begin);
      return args;
    }

    Tensor loss, lse, residual;
  };

  // The gradients of a call, and the arguments for those of a chunk's logits, which are written over them.
  struct Gradients {
    Gradients(const Call& call, const Wanted& wanted) : head(call.chunks()), like(call.head.input) {
      head.begin_gradients(wanted, call.head.weight, call.head.bias);
      if (wanted.values)
        values = torch::stable::new_zeros(call.held.indices, call.held.indices.sizes(), arithmetic_dtype(like));
    }

    BackwardArgs chunk(const BackwardArgs& all, int64_t begin, const Tensor& z) const {
      BackwardArgs args = all;
      static_cast<CrossEntropyArgs&>(args) = chunk_args(all, begin, z);
      const DType dtype = arithmetic_dtype(like) == ScalarType::Double ? DType::kFloat64 : DType::kFloat32;
      args.grad_loss = advance(all.grad_loss, dtype, begin * all.grad_loss_stride);
      if (all.grad_lse) args.grad_lse = advance(all.grad_lse, dtype, begin * all.grad_lse_stride);
      args.lse = advance(all.lse, dtype, begin);
      if (all.lse_residual) args.lse_residual = advance(all.lse_residual, dtype, begin);
      args.grad_logits = z.mutable_data_ptr();
      args.grad_row_stride = args.row_stride;
      if (values) {
        const int64_t first = all.target.offsets ? 0 : begin * all.target.width;
        args.grad_values = advance(values->mutable_data_ptr(), dtype, first);
      }
      return args;
    }

    std::tuple<Tensor, Tensor, Tensor, Tensor> tensors() const {
      // An empty tensor each: no two outputs of an op may be one.
      const auto or_empty = [&](const OptionalTensor& gradient) {
        return gradient ? *gradient : empty(like, {0}, like.scalar_type());
      };
      return {or_empty(head.grad_input), or_empty(head.grad_weight), or_empty(head.grad_bias), or_empty(values)};
    }

    LinearHead<device_t> head;
    Tensor like;
    OptionalTensor values;
  };

  static CrossEntropyArgs chunk_args(const CrossEntropyArgs& all, int64_t begin, const Tensor& z) {
    CrossEntropyArgs args = all;
    args.logits = z.const_data_ptr();
    args.dtype = to_dtype(z, "logits", /*integer=*/false);
    args.rows = z.size(0);
    args.row_stride = all.vocab;
    args.target = all.target.slice(begin, begin + args.rows);
    return args;
  }

  // f(begin, z) for the logits z of the rows from `begin` on.
  template <typename function_t>
  static void for_each_chunk(const Call& call, LinearHead<device_t>& head, const function_t& f) {
    for (int64_t begin = 0; begin < head.rows(); begin += head.chunk_rows()) {
      const int64_t end = std::min(head.rows(), begin + head.chunk_rows());
      f(begin, head.logits(begin, call.live_args.target.slice(begin, end)));
    }
  }

  static std::tuple<Tensor, Tensor, Tensor> run_forward(const Call& call) {
    const Rows rows(call);
    LinearHead<device_t> head = call.chunks();
    for_each_chunk(call, head, [&](int64_t begin, const Tensor& z) {
      device_t::forward(rows.chunk(call.live_args, begin, z), call.head.input);
    });
    return {call.spread(rows.loss), call.spread(rows.lse), call.spread(rows.residual)};
  }
};

}  // namespace sparse_ce
