"""Dashboards that exist already: each module sends the events of saves and loads to one of them.

    from fastpersist.integrations.monitoring import tensorboard
    stop = tensorboard.attach(writer)

Where to look:

    tensorboard     scalars of a SummaryWriter
    wandb           metrics of a run of Weights & Biases
    mlflow          metrics of a run
    prometheus      counters and gauges to be scraped, or a text file for the node exporter
    opentelemetry   a span for each save, with its phases, and for each load
    figures         which numbers of an event they show, and under which names

Each `attach` subscribes to `fastpersist.events` and returns a function that ends this. What it does runs on the thread
that delivers events, never on the one that trains; an error of a dashboard is logged once, and reaches nobody.
"""
