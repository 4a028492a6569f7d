"""Sends events of saves and loads to existing dashboards, one module for each.

    from fastpersist.integrations.monitoring import tensorboard
    stop = tensorboard.attach(writer)

Where to look:

    tensorboard     scalars of a SummaryWriter
    wandb           metrics of a run of Weights & Biases
    mlflow          metrics of a run
    prometheus      counters and gauges to be scraped, or a text file for the node exporter
    opentelemetry   a span for each save, with its phases, and for each load
    figures         the numbers of an event that they show, and their names

Each `attach` subscribes to `fastpersist.events` and returns a function that unsubscribes. Its callback runs on the
thread that delivers events, never on the training thread; an error of a dashboard is logged once, and not raised.
"""
