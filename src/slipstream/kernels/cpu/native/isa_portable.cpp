#define SLIP_ISA 0
#define SLIP_NAMESPACE portable
#include "kernels.h"
