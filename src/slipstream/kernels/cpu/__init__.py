"""CPU kernels: a small C++ library with a plain C interface, and the backend that calls it."""
