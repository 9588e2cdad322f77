"""The processes that hold a model together: how they are started, meet, and speak beside their tensors."""
