"""Kernels of training: forward and backward over packed rows and the loss; torch's operations are the specification."""
