"""Runs an OpenHands SDK agent in the current directory, by the interpreter that the SDK is installed for; options are JSON."""

# Runs in the scaffold's own virtual environment.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.tool import Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool


def main() -> None:
    options = json.loads(sys.argv[1])
    instruction, condense = options.pop("instruction"), options.pop("condense", None)
    llm = LLM(usage_id="agent", **options)
    condenser = None
    if condense:
        small = llm.model_copy(update={"usage_id": "condenser"})
        condenser = LLMSummarizingCondenser(llm=small, **condense)
    tools = [Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)]
    agent = Agent(llm=llm, tools=tools, condenser=condenser)
    conversation = Conversation(agent=agent, workspace=str(Path.cwd()), visualizer=None)
    conversation.send_message(instruction)
    conversation.run()
    print("finished")


if __name__ == "__main__":
    main()
