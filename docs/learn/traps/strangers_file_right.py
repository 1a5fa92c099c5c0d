import pickle

import torch


class Stranger:
    def __reduce__(self):
        return print, ("code of the file runs with your rights",)


torch.save({"weights": torch.ones(2), "more": Stranger()}, "model.pt")  # somebody else's machine
try:
    torch.load("model.pt", map_location="cpu")
    print("loaded")
except pickle.UnpicklingError as error:
    print("refused:", str(error).partition(". ")[0])
