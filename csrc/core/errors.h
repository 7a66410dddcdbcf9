// errors.h - user errors. Every message reads "sparse_ce: <argument> must be <expectation>, got <value>".
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

// The parts are printed where the condition fails only: they must cost nothing to name.
template <typename... parts_t>
void check(bool condition, const parts_t&... parts) {
  if (!condition) fail(parts...);
}

}  // namespace sparse_ce
