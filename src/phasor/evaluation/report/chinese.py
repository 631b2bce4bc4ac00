"""Chinese for the words of reports that come from registries and records; what is missing here stays English."""

TABLE_HEADS = {
    "model": "模型", "scheme": "方案", "name": "名称", "what it is": "是什么", "what": "项目", "value": "值",
    "depth": "深度", "claim": "论断", "at": "在", "here": "此处", "published": "已发表", "ours": "我们的",
}  # fmt: skip
PROVENANCE = {
    "device": "设备", "dtype": "数据类型", "seed": "随机种子", "seeds": "随机种子", "steps": "步数",
    "tokenizer": "分词器", "model": "模型", "data_sha256": "数据的 SHA-256",
}  # fmt: skip
PROTOCOLS = {
    "last": "每行最后的词元，在每个长度上都是同一批",
    "sliding": "所有词元，窗口按步长移动，彼此重叠",
    "truncated": "所有词元，窗口互不重叠",
}
NAMES = {"a model in memory": "内存中的模型"}
UNITS = {"row": "行", "document": "篇文档"}
ITEMS = {"letter": "个字母", "digit": "位数字", "bit": "个比特", "slot": "个槽位"}
MODELS = {
    "own": "保存时的模型",
    "none": "不做扩展",
    "window": "保存时的模型，注意力窗口为训练长度",
    "sinks": "保存时的模型，注意力窗口为训练长度，最前面的 4 个词元始终可见，距离不超出窗口（StreamingLLM）",
    "linear": "位置插值（PI）：所有频率除以同一因子",
    "ntk": "NTK-aware：增大底数；快的频率对不变，最慢的被插值",
    "dynamic-ntk": "NTK-aware，序列超过原长度后底数随之增大",
    "yarn": "YaRN：快的频率对保留，慢的插值，中间过渡，softmax 更尖锐",
    "dynamic-yarn": "YaRN，因子随序列长度变化",
    "llama3": "Llama 3.1：短波长保留，长波长除以因子，中间平滑过渡",
    "longrope": "LongRoPE：每个频率对有各自的除数，原长度以内和以外各一组",
    "proportional": "只有最快的一部分频率对旋转，其余不动",
    "drop": "原先旋转的层不再有位置",
}
RETRIEVAL_TASKS = {
    "passkey": "一个五位数，最后提问",
    "needle": "某个键对应的数字（RULER，单键）",
    "multikey": "四个键中某一个对应的数字（RULER，多键）",
    "variables": "一个值传递到的所有变量（RULER，变量追踪）",
    "recall": "与某个字母配对的数字（phasor train recall）",
}
