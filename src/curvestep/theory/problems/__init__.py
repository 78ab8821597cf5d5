"""Functions whose value, gradient, Hessian norm and (L0, L1) frontier are known exactly."""
