// errors.h - Raises errors. A message about an argument reads "sparse_ce: <argument> must be <expectation>, got
// <value>".
#pragma once

#include <sstream>
#include <stdexcept>

namespace sparse_ce {

template <typename... parts_t>
[[noreturn]] void fail(const parts_t&... parts) {
  std::ostringstream out;
  out << "sparse_ce: ";
  ((out << parts), ...);
  throw std::runtime_error(out.str());
}

// Raises an error if the condition is false. The parts are formatted only then, so they must be cheap to evaluate.
template <typename... parts_t>
void check(bool condition, const parts_t&... parts) {
  if (!condition) fail(parts...);
}

}  // namespace sparse_ce
