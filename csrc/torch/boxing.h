// boxing.h - Wraps an op's C++ function for the dispatcher, which passes arguments on a stack. Unlike TORCH_BOX it
// allows parameters that are structs of several arguments.
#pragma once

#include "tensors.h"

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>

namespace sparse_ce {

// Takes the values from a stack in order. Each value gets an owner of its own.
class Stack {
 public:
  Stack(StableIValue* begin, uint64_t count) : begin_(begin), next_(begin), end_(begin + count) {}

  template <typename value_t>
  value_t next() {
    check(next_ != end_, "schema must match its kernel, got too few arguments");
    value_t value = torch::stable::detail::to<value_t>(*next_++);
    if constexpr (std::is_same_v<value_t, Tensor>)
      if (undefined_ == 0 && !value.defined()) undefined_ = next_ - begin_;
    return value;
  }
  template <typename parameter_t>
  parameter_t take() {
    if constexpr (std::is_constructible_v<parameter_t, Stack&>)
      return parameter_t(*this);
    else
      return next<parameter_t>();
  }
  // Checks the values after all of them have an owner: an earlier exception would leak the remaining ones.
  void check_end() const {
    check(next_ == end_, "schema must match its kernel, got too many arguments");
    check(undefined_ == 0, "argument must be a tensor, got None for argument ", undefined_, " of the op");
  }

 private:
  StableIValue *begin_, *next_, *end_;
  int64_t undefined_ = 0;  // position of the first undefined tensor, counted from 1
};

// Base class of argument structs. next<type>() initializes their members in schema order.
class OnStack {
 public:
  explicit OnStack(Stack& stack) : stack_(stack) {}

 protected:
  template <typename value_t>
  value_t next() {
    return stack_.next<value_t>();
  }

 private:
  Stack& stack_;  // outlives the call
};

template <auto function>
struct Boxed;

template <typename result_t, typename... parameters_t, result_t (*function)(parameters_t...)>
struct Boxed<function> {
  static void call(StableIValue* values, uint64_t inputs, uint64_t outputs) try {
    Stack stack(values, inputs);
    std::tuple<std::decay_t<parameters_t>...> arguments{stack.take<std::decay_t<parameters_t>>()...};  // left to right
    stack.check_end();
    if constexpr (std::is_void_v<result_t>)
      std::apply(function, arguments);
    else
      push_results(std::apply(function, arguments), values, outputs);
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(std::string(kHostOutOfMemory) + "std::bad_alloc");
  }

 private:
  template <typename... results_t>
  static void push_results(const std::tuple<results_t...>& results, StableIValue* values, uint64_t outputs) {
    check(sizeof...(results_t) == outputs, "schema must have as many results as its kernel, got ", outputs);
    std::apply([&](const auto&... result) { ((*values++ = torch::stable::detail::from(result)), ...); }, results);
  }
  static void push_results(const Tensor& result, StableIValue* values, uint64_t outputs) {
    push_results(std::tuple<const Tensor&>(result), values, outputs);
  }
};

// Usage: m.impl("forward", boxed<forward>);
template <auto function>
constexpr auto boxed = &Boxed<function>::call;

}  // namespace sparse_ce
