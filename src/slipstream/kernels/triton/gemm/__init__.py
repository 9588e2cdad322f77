"""Matrix products: few rows by many weights, in BF16, FP8, INT8, INT4 and MXFP4."""
