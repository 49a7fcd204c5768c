//! A stand-in for libcuda.so.1, for tests without a GPU.
