"""The node half: who the node is, its private state, its training."""
