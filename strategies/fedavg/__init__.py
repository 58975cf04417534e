"""FedAvg (McMahan et al., AISTATS 2017, arXiv 1602.05629): equal models, averaged with sample counts as weights."""
