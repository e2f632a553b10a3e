"""/v1/models. Names hold slashes and arrive as %2F, hence the path converters."""

from fastapi import APIRouter

from api.auth import CurrentScope
from api.openai import model_service
from api.openai.model_service import ModelObject
from api.paging import ListObject, list_object

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def list_(scope: CurrentScope) -> ListObject[ModelObject]:
    items = model_service.list_models(scope)
    return list_object(items, [item.id for item in items])


@router.get("/{model:path}")
def retrieve(scope: CurrentScope, model: str) -> ModelObject:
    return model_service.retrieve_model(scope, model)
