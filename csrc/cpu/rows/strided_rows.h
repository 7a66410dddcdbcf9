// strided_rows.h - rows that lie side by side, their classes apart, as the pixels of images: worked on where they lie,
// a block of rows at a time, a column after the other. Args whose `strided` is set.
#pragma once

#include "../../ops/cross_entropy.h"

namespace sparse_ce {
namespace cpu {

void strided_forward(const ForwardArgs& args);
// `backward` reads what `forward` writes.
void strided_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward);
void strided_backward(const BackwardArgs& args);
void strided_backward_values(const BackwardArgs& args);

}  // namespace cpu
}  // namespace sparse_ce
