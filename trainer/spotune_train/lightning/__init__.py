"""Lightning in a training function: one callback reports, saves and resumes.

trainer = Trainer(..., callbacks=[SpotuneCallback(every_n_steps=100)])
trainer.fit(model, loader, ckpt_path=SpotuneCallback.checkpoint())

It works with the package `lightning`, and with `pytorch_lightning` if that has been imported before.
"""

from spotune_train.lightning.callback import SpotuneCallback

__all__ = ["SpotuneCallback"]
