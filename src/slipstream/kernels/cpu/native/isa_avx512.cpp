#define SLIP_ISA 2
#define SLIP_NAMESPACE avx512
#include "kernels.h"
