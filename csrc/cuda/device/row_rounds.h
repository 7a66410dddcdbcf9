// row_rounds.h - Deals rows to groups of threads that each process several.
#pragma once

#include "../../core/dtype.h"

#include <algorithm>
#include <cstdint>

namespace sparse_ce {
namespace cuda {

// Deals rows in rounds, in each of which `groups` groups get the same number of rows, `groups` apart. The first round
// deals `first` rows to each, and each further round about half of what is left. Groups of a late round begin when
// others end, so the device is busy until the end, even if other kernels occupy a part of it in between. Rows are fewer
// than 2^31, because a division of 64 bits takes a hundred instructions.
struct RowRounds {
  uint32_t groups;
  uint32_t first;

  struct Share {
    int64_t first;
    uint32_t rows;  // `groups` apart; the last one may not exist
  };

  // Deals one row to each group.
  static RowRounds once(int64_t rows) { return {static_cast<uint32_t>(rows), 1}; }
  // Deals all rows in the first round.
  static RowRounds equal(int64_t rows, int64_t groups) {
    const int64_t fewer = std::min(rows, groups);
    return {static_cast<uint32_t>(fewer), static_cast<uint32_t>((rows + fewer - 1) / fewer)};
  }
  // `groups` run at the same time.
  static RowRounds halving(int64_t rows, int64_t groups) {
    // An odd number: otherwise rows at regular distances, which may all be ignored, could be dealt to the same groups.
    const auto odd = static_cast<uint32_t>(groups > 16 ? groups - 1 + groups % 2 : groups);
    return {odd, half_of(static_cast<uint32_t>(rows), odd)};
  }

  SCE_HD Share of(int64_t group, int64_t rows) const {
    int64_t begin = 0;
    uint32_t each = first;
    for (; group >= groups && begin < rows; group -= groups) {
      begin += int64_t(groups) * each;
      if (begin < rows) each = half_of(static_cast<uint32_t>(rows - begin), groups);
    }
    return {begin + group, each};
  }
  // Returns the number of groups in all rounds.
  int64_t count(int64_t rows) const {
    int64_t found = 0, each = first;
    for (int64_t left = rows; left > 0; each = half_of(static_cast<uint32_t>(std::max<int64_t>(left, 0)), groups)) {
      found += std::min<int64_t>(left, groups);
      left -= groups * each;
    }
    return found;
  }

 private:
  SCE_HD static uint32_t half_of(uint32_t left, uint32_t groups) {
    const uint32_t each = left / (2 * groups);
    return each > 1 ? each : 1;
  }
};

}  // namespace cuda
}  // namespace sparse_ce
