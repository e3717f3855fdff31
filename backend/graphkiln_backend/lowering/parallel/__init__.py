"""One model over several devices: where its graph is cut, what each device holds, and what computes the parts."""
