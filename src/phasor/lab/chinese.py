"""The sentences of refusals in Chinese, for readers of the Chinese page."""

from __future__ import annotations

import re
from functools import cache

# In the order in which they are tried; `{}` stands for what differs, in the same order in both languages.
SENTENCES = {
    "this takes more than {} seconds: choose smaller sizes": "这要算 {} 秒以上：请选小一些的尺寸",
    "this needs more than {} bytes of memory: choose smaller sizes": "这需要 {} 字节以上的内存：请选小一些的尺寸",
    "too many computations are waiting: try again in a moment": "排队的计算太多：请稍后再试",
    "the process that computed this ended with the exit code {}": "计算它的进程已结束，退出码为 {}",
    "this request is nested too deeply": "这个请求嵌套太深",
    "the lab failed with {}; the terminal says where": "实验室出错：{}；终端里写着出错的位置",
    "the request has more than {} MiB": "请求超过 {} MiB",
    "there is no such file": "没有这个文件",
    "there is no such endpoint; /openapi.json lists them": "没有这个接口；/openapi.json 列出了全部接口",
    "the body must be application/json": "请求体必须是 application/json",
    "this is not JSON: {}": "这不是 JSON：{}",
    "{} is not a number of JSON": "{} 不是 JSON 的数字",
    "this matrix has {} elements; at most {} are sent": "这个矩阵有 {} 个元素；最多发送 {} 个",
    "the values of this scheme overflow at these positions: choose smaller ones": (
        "这种方案的值在这些位置溢出：请选小一些的位置"
    ),
    "the residual stream overflows: choose fewer layers, a smaller gain or a norm": (
        "残差流溢出：请减少层数、减小增益，或选一种归一化"
    ),
    "the endpoint {} is registered already": "接口 {} 已经注册",
    "{} is a link out of the folder, and is not read": "{} 是指向文件夹之外的链接，不会读取",
    "there is no folder {}; there are {}": "没有第 {} 个文件夹；现有：{}",
    "{} must be an object with the fields of a model, not {}": "{} 必须是含模型字段的对象，而不是 {}",
    "the heads of this model have {} features, and {} are the most": "这个模型的头有 {} 个特征，最多 {} 个",
    "this model has no rotary positions to extend: its positions are {}": "这个模型没有可扩展的旋转位置：它的位置是 {}",
    "the preset {} {}; with rotary: {}": "预设 {} 不能用（{}）；使用旋转位置的有：{}",
    "{} holds no model": "{} 里没有模型",
    "the source of this model are features, and no text": "这个模型的输入是特征，而不是文本",
    "this encoder-decoder does not say which token its decoder starts with": (
        "这个编码器-解码器没有说明解码器从哪个词元开始"
    ),
    "this model has no tokenizer: give token ids with spaces between, as in 5 17 2": (
        "这个模型没有分词器：请输入以空格分开的词元编号，例如 5 17 2"
    ),
    "this text has {}": "这段文本不能用：{}",
    "positions must have at most {} axes here, not {}": "这里的位置最多有 {} 个轴，而不是 {}",
    "a scheme must have at most {} weights here, not {}": "这里的方案最多有 {} 个权重，而不是 {}",
    "head must be below the number of heads, {}, not {}": "head 必须小于头数 {}，而不是 {}",
    "start and length must end at a position of at most 2^36": "start 加 length 不能超过位置 2^36",
    "the table of {} positions ends after {} positions": "{} 的位置表只有 {} 个位置",
    "dim must be a multiple of 8, not {}: every scheme takes it": "dim 必须是 8 的倍数，而不是 {}：这样每种方案都能用",
    "{} must be at most {} here": "{} 在这里最多为 {}",
    "{} tokens times {} are more than 2^36, the most that is shown": "{} 个词元乘以 {} 超过 2^36，即能显示的最大值",
    "give either the name of a preset or the text of a config.json": "请给出预设的名字或 config.json 的文本，二者之一",
    "a config.json may have 1 MB, and this text has more": "config.json 最多 1 MB，这段文本超过了",
    "the fields of {} must be an object": "{} 的字段必须是一个对象",
    "these settings give frequencies beyond what float64 holds: use smaller numbers": (
        "这些设置得出的频率超出 float64 的范围：请用小一些的数"
    ),
    "a sentence has 1 to {} words with spaces between them, not {}": "一句话有 1 到 {} 个以空格分开的词，而不是 {} 个",
    "index must be at most {}, that of the last token, not {}": "index 最多为 {}，即最后一个词元的编号，而不是 {}",
    "this {} has {} attention, and no {} attention": "这个 {} 有 {} 注意力，没有 {} 注意力",
    "these are more than {} weights: ask for one layer and one head": "权重超过 {} 个：请只选一层和一个头",
    "{} must be at most {}, not {}: they are counted from 0": "{} 最多为 {}，而不是 {}：从 0 数起",
    "activation must be a gated one ({}), not {}": "activation 必须是带门控的（{}），而不是 {}",
    "multiplier must be between 0.001 and 1,000 here": "multiplier 在这里必须在 0.001 到 1,000 之间",
    "head_dim must be even, not {}: features rotate in pairs": "head_dim 必须是偶数，而不是 {}：特征成对旋转",
    "folder {}, {}, holds no report of phasor evaluate --lengths": (
        "第 {} 个文件夹 {} 里没有 phasor evaluate --lengths 的报告"
    ),
    "{} is not a report of phasor evaluate --lengths": "{} 不是 phasor evaluate --lengths 的报告",
    "{} has more than {} MiB, which are not shown": "{} 超过 {} MiB，不予显示",
    "{} must have at least {} characters, not {} characters": "{} 至少要有 {} 个字符，而不是 {} 个",
    "{} must have at most {} characters, not {} characters": "{} 最多有 {} 个字符，而不是 {} 个",
    "{} must have at most {} items, not {}": "{} 最多有 {} 项，而不是 {} 项",
    "{} must be an integer of at least {}, not {}": "{} 必须是不小于 {} 的整数，而不是 {}",
    "{} must be at least {}, not {}": "{} 至少为 {}，而不是 {}",
    "{} must be at most {}, not {}": "{} 最多为 {}，而不是 {}",
    "{} must be greater than {}, not {}": "{} 必须大于 {}，而不是 {}",
    "{} must be an integer, not {}": "{} 必须是整数，而不是 {}",
    "{} must be a number, not {}": "{} 必须是数，而不是 {}",
    "{} must be a finite number, not {}": "{} 必须是有限的数，而不是 {}",
    "{} must be one of {}, not {}": "{} 必须是 {} 之一，而不是 {}",
    "unknown {} {} (did you mean {}?); known: {}": "未知的 {} {}（是否指 {}？）；可用：{}",
    "unknown {} {}; known: {}": "未知的 {} {}；可用：{}",
}


@cache
def pattern(sentence: str) -> re.Pattern[str]:
    return re.compile("(.+?)".join(map(re.escape, sentence.split("{}"))))


def translate(sentence: str) -> str:
    """A sentence in Chinese, or as it is where it is none of the lab's nor of a common check of a field.

    >>> translate("start must be at least 0, not -1")
    'start 至少为 0，而不是 -1'
    """
    for english, chinese in SENTENCES.items():
        if match := pattern(english).fullmatch(sentence):
            return chinese.format(*match.groups())
    return sentence
