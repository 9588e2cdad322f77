#define SLIP_ISA 1
#define SLIP_NAMESPACE avx2
#include "kernels.h"
