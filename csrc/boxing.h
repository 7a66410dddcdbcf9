// boxing.h - an op's C++ function as the dispatcher calls it: with the values of its schema on a stack. What TORCH_BOX
// does, but a parameter may also be a struct of arguments, which takes several values.
#pragma once

#include "tensors.h"

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>

namespace sparse_ce {

// Takes the values of a stack one after the other, each into an owner of its own.
class Stack {
 public:
  Stack(StableIValue* begin, uint64_t count) : next_(begin), end_(begin + count) {}

  template <typename value_t>
  value_t next() {
    check(next_ != end_, "schema must have the arguments of its kernel, got too few");
    return torch::stable::detail::to<value_t>(*next_++);
  }
  template <typename parameter_t>
  parameter_t take() {
    if constexpr (std::is_constructible_v<parameter_t, Stack&>)
      return parameter_t(*this);
    else
      return next<parameter_t>();
  }
  bool empty() const { return next_ == end_; }

 private:
  StableIValue *next_, *end_;
};

// Base of a struct of arguments, whose members, in the order of the schema, are initialised by next<type>().
class OnStack {
 public:
  explicit OnStack(Stack& stack) : stack_(stack) {}

 protected:
  template <typename value_t>
  value_t next() {
    return stack_.next<value_t>();
  }

 private:
  Stack& stack_;  // lives as long as the call
};

template <auto function>
struct Boxed;

template <typename result_t, typename... parameters_t, result_t (*function)(parameters_t...)>
struct Boxed<function> {
  static void call(StableIValue* values, uint64_t inputs, uint64_t outputs) {
    Stack stack(values, inputs);
    std::tuple<std::decay_t<parameters_t>...> arguments{stack.take<std::decay_t<parameters_t>>()...};  // left to right
    check(stack.empty(), "schema must have the arguments of its kernel, got too many");
    if constexpr (std::is_void_v<result_t>)
      std::apply(function, arguments);
    else
      give(std::apply(function, arguments), values, outputs);
  }

 private:
  template <typename... results_t>
  static void give(const std::tuple<results_t...>& results, StableIValue* values, uint64_t outputs) {
    check(sizeof...(results_t) == outputs, "schema must have the results of its kernel, got ", outputs);
    std::apply([&](const auto&... result) { ((*values++ = torch::stable::detail::from(result)), ...); }, results);
  }
  static void give(const Tensor& result, StableIValue* values, uint64_t outputs) {
    give(std::tuple<const Tensor&>(result), values, outputs);
  }
};

// m.impl("forward", boxed<forward>);
template <auto function>
constexpr auto boxed = &Boxed<function>::call;

}  // namespace sparse_ce
